r"""How far a network's output can move when a few tokens of its input move.

Let k of n tokens change. A perturbation is followed in two parts, :math:`E = S + Q`: S lives on these k
tokens, Q anywhere, with :math:`\|S\|_F \le s` and :math:`\|Q\|_F \le q`. At first q = 0.

* A map of each token alone, of constant L, moves token i by at most
  :math:`L(\|S_i\| + \|Q_i\|)`, one that is none of the k by at most :math:`L \|Q_i\|`: so
  :math:`(s, q) \to (L s, L q)`.
* A residual :math:`a x + b f(x)` around a map f of all tokens keeps :math:`a S` where it is; the rest is
  :math:`a Q` and what f adds: :math:`(s, q) \to (a s, a q + b\, m(s + q))` for a modulus m of f.
* The mean of the tokens moves by at most
  :math:`\frac1n \|\sum_i S_i + \sum_i Q_i\| \le (\sqrt k s + \sqrt n q) / n`.

Without attention k tokens count k times 1/n, where the l2 norm alone gives :math:`\sqrt{k / n}`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lipformer.analysis.robustness.lofast import Modulus
from lipformer.analysis.robustness.perturbation import Step
from lipformer.certificate import Ask
from lipformer.certificate.activations import SLOPES
from lipformer.certificate.torch_rules import DROPOUTS, chain
from lipformer.functional.rounding import ROUND_UP
from lipformer.layers import ConvexResidual, LipSwish, MaxMin, Residual, TokenMean
from lipformer.models.vision_transformer import Positions

_ALONE = (nn.Linear, nn.Identity, MaxMin, LipSwish, Positions, *SLOPES, *DROPOUTS)


def few_tokens_modulus(parts: Mapping[str, nn.Module], whole: Step, tokens: int, count: int) -> Modulus:
    """Bounds of the output (B,) for steps of at most k tokens, each by at most eps, (B,) -> (B,).

    Args:
        parts: modules that run one after another, by name.
        whole: the modulus of all, whose parts are theirs.
        tokens: k.
        count: n, the tokens of the input.
    """
    changed = min(tokens, count)
    steps = [(parts[name], step) for name, step in whole.parts]

    def modulus(eps: Tensor) -> Tensor:
        s, q = eps * (math.sqrt(changed) * ROUND_UP), torch.zeros_like(eps)
        for module, step in steps:
            s, q = _through(module, step, s, q, changed, count)
        return (s + q) * ROUND_UP

    return modulus


def _through(
    module: nn.Module, step: Step, s: Tensor, q: Tensor, changed: int, count: int
) -> tuple[Tensor, Tensor]:
    if isinstance(module, TokenMean):
        # Where s is not zero yet, all modules so far kept the number of tokens.
        mean = s * (math.sqrt(changed) / max(count, module.least) * ROUND_UP**2) + step(q)
        return torch.zeros_like(s), mean * ROUND_UP
    if step.whole is not None and _alone(module):
        factor = step.whole.bound * ROUND_UP
        return factor * s, factor * q
    if isinstance(module, Residual | ConvexResidual) and [name for name, _ in step.parts] == ["branch"]:
        kept, added = (
            (1.0, 1.0) if isinstance(module, Residual) else (1.0 - module.weight, module.weight)
        )
        spread = kept * q + added * step.parts[0][1]((s + q) * ROUND_UP)
        return kept * s * ROUND_UP, spread * ROUND_UP**2
    return torch.zeros_like(s), step((s + q) * ROUND_UP)


def _alone(module: nn.Module) -> bool:
    """Whether a module, of classes whose forward is theirs, treats each token alone."""
    leaves = chain(module, Ask("l2"))
    return all(
        _alone(leaf.branch) if isinstance(leaf, Residual | ConvexResidual) else isinstance(leaf, _ALONE)
        for leaf in leaves
    )
