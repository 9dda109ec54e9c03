"""certify: what is asked of a module, and who answers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lipformer.certificate.bounds import Ask, answer, check_seq_len, check_tensors
from lipformer.certificate.certificate import Certificate, NotCertifiable
from lipformer.certificate.follow import follow
from lipformer.certificate.rules import kind_of
from lipformer.certificate.wrappers import gathered, refuse_sharded, unwrapped
from lipformer.functional.norms import check_norm

_Local = Callable[[nn.Module, Tensor, float], Certificate]
_local: list[_Local] = []


def register_local(answer: _Local) -> _Local:
    """Decorator: what answers :func:`certify` around an input, in lipformer.analysis, which is above."""
    _local[:] = [answer]
    return answer


@torch.no_grad()
def certify(
    module: nn.Module,
    *,
    seq_len: int | None = None,
    norm: str = "l2",
    at: Tensor | None = None,
    radius: float | None = None,
    example: Tensor | None = None,
) -> Certificate:
    r"""Returns a certified upper bound on a module's Lipschitz constant.

    The bound holds for exact arithmetic with the weights that the module multiplies by
    (docs/certificates, "The function"), in the module's current mode (train or eval).

    With ``at`` and ``radius`` the bound is local: for each sample x of ``at`` and every x' with
    :math:`\|x' - x\| \le \epsilon` it holds that :math:`\|f(x') - f(x)\| \le L \epsilon`
    (docs/certificates, "Around an input"), by the moduli of
    :func:`lipformer.analysis.perturbation_bound`.

    With ``example`` a model may have its own forward around modules that have a rule: it runs on
    the example and is traced operation by operation (docs/certificates, "A forward of your own"). The
    bound then holds for samples of the example's shape.

    Args:
        module: any module made of classes that have a rule: lipformer's layers, the usual torch
            layers and containers, and what :func:`register_bound` adds; also inside DDP, DataParallel,
            torch.compile, AveragedModel, fully_shard or a class that only calls its one child.
        seq_len: the largest number of tokens; needed by attention without ``max_len``, window or
            ALiBi.
        norm: "l2" (Frobenius over tokens), "token" (largest token), "self" (a token's effect on its own
            output in a causal layer, Theorem E) or "linf".
        at: samples (B, N, D), (B, D) or images; for a language model embedded tokens.
        radius: :math:`\epsilon > 0`, in the l2 norm of a sample; needs ``at``.
        example: a batch of samples (B, ...), without ``seq_len``, ``at`` and ``radius``. Integers are
            symbols, and the bound holds from the output of the embedding that looks them up.

    Raises:
        NotCertifiable: a submodule has no bound in this norm; names its path, the reason and a remedy.

    Example:
        >>> linear = nn.Linear(2, 2, bias=False)
        >>> _ = nn.init.eye_(linear.weight)
        >>> print(certify(nn.Sequential(linear, nn.GELU())))
        Lipschitz bound 1.1289 in the l2 norm, for every input
        module  kind         bound  theorem
        -----------------------------------------
        (all)   Sequential  1.1289  composition
          0     Linear           1  spectral norm
          1     GELU        1.1289  largest slope
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"certify takes a torch.nn.Module, got {type(module).__name__}")
    check_norm(norm)
    check_seq_len(seq_len)
    if example is not None:
        if not isinstance(example, Tensor):
            raise ValueError(
                f"example must be one tensor of samples, got {type(example).__name__}: of a tokenizer's "
                'output give ["input_ids"]'
            )
        if any(v is not None for v in (seq_len, at, radius)):
            raise ValueError(
                "example says the number of tokens, and its bound is global: leave out seq_len, at and "
                f"radius, got seq_len={seq_len!r}, radius={radius!r}"
            )
        check_tensors(module)
        return follow(module, example, norm)
    if at is None and radius is None:
        with gathered(module):
            return answer(module, Ask(norm, seq_len))
    if not isinstance(at, Tensor) or not isinstance(radius, (int, float)) or not 0.0 < radius < math.inf:
        raise ValueError(
            "a certificate around an input needs both at, a tensor of samples, and radius, positive and "
            f"finite; got at of type {type(at).__name__} and radius={radius!r}"
        )
    if seq_len is not None and seq_len != at.shape[-2]:
        raise ValueError(f"at has {at.shape[-2]} tokens, got seq_len={seq_len}: leave it out")
    if norm != "l2":
        raise NotCertifiable(
            "",
            kind_of(module),
            f"bounds around an input are known in the l2 norm alone, got norm={norm!r}",
            "norm='l2', or certify without at and radius",
        )
    check_tensors(module)
    refuse_sharded(module)
    inside = unwrapped(module, Ask("l2", kind=kind_of(module)).refuse)
    return _local[0](inside, at, float(radius))
