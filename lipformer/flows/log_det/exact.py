"""The log-determinant from the dense Jacobian: for tests and small events.

The exact log-determinant of causal and token-wise branches, token by token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipformer.functional.pullback import pull_all
from lipformer.layers.layout import without_padding
from lipformer.layers.own_token import push_own, unknown_parts
from lipformer.layers.residual import same_shape

# Entries of a batch of output directions that are pulled back at once.
_BUDGET = 2**22


def dense_jacobian(out: Tensor, x: Tensor, *, create_graph: bool) -> Tensor:
    """The Jacobian of each sample, (B, n, n) with n = T D, rows for outputs.

    Samples must not influence each other. Pulls back the n output directions, a chunk of them at a
    time, so that only the result is of size B n^2 unless a graph is asked for.

    Args:
        out: f(x) (B, T, D), in a graph that x is in.
        x: (B, T, D).
        create_graph: make the Jacobian differentiable.
    """
    batch, tokens, width = out.shape
    n = tokens * width
    chunk = max(1, min(n, _BUDGET // max(1, batch * tokens * (tokens + width))))
    directions = torch.eye(n, dtype=out.dtype, device=out.device).view(n, 1, tokens, width)
    rows = [
        pull_all(out, x, part.expand(-1, batch, -1, -1), create_graph=create_graph)
        for part in directions.split(chunk)
    ]
    return torch.cat(rows).reshape(n, batch, n).transpose(0, 1)


def exact_log_det(out: Tensor, x: Tensor, *, create_graph: bool) -> Tensor:
    r""":math:`\log|\det(I + J)|` of each sample by an LU factorisation, (B,).

    Source: docs/theory, section 6. Cost :math:`TD` backward passes and :math:`O((TD)^3)`.

    Args:
        out: f(x) (B, T, D), in a graph that x is in.
        x: (B, T, D).
        create_graph: make the result differentiable.
    """
    jacobian = dense_jacobian(out, x, create_graph=create_graph)
    jacobian = jacobian.to(torch.promote_types(jacobian.dtype, torch.float32))
    one = torch.eye(jacobian.shape[-1], dtype=jacobian.dtype, device=jacobian.device)
    return torch.linalg.slogdet(one + jacobian).logabsdet


def supports_causal(branch: nn.Module) -> bool:
    """Whether a branch is known to be causal: token-wise or causal=True all the way down.

    Known are nn.Linear, nn.Sequential, the usual activations, LayerNorm and RMSNorm of one dimension,
    lipformer's layers, attention built with causal=True, and any module with an attribute
    ``token_wise = True`` or ``causal = True``.

    Example:
        >>> import lipformer as lf
        >>> supports_causal(lf.FeedForward(4, 8)), supports_causal(lf.L2MultiheadAttention(4, 2))
        (True, False)
    """
    return next(unknown_parts(branch), None) is None


def check_causal(branch: nn.Module) -> None:
    """Raises unless :func:`supports_causal`, and names the part that is not known."""
    for path, module in unknown_parts(branch):
        causal = getattr(module, "causal", "no attribute causal")
        raise ValueError(
            f"method 'causal' needs a branch that is causal or token-wise all the way down, but {path} "
            f"({type(module).__name__}, causal={causal!r}) is not known to be; use method 'series', "
            "'roulette' or 'exact', or attention with causal=True; a module of your own may say so "
            "with an attribute causal = True or token_wise = True"
        )


def causal_log_det(branch: nn.Module, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    r""":math:`\sum_i \log|\det(I + J_{ii})|`: exact, as I + J is block lower triangular.

    Source: docs/theory, section 6. Needs first derivatives only, in closed form for attention.

    Args:
        branch: causal all the way down.
        x: (B, T, D).
        padding: (B, T) or None.

    Returns:
        The branch's output (B, T, D), zero at padded tokens, and (B,).
    """
    width = x.shape[-1]
    one = torch.eye(width, dtype=x.dtype, device=x.device)
    tangents = one[:, None, None].expand(-1, *x.shape)
    out, pushed = push_own(branch, without_padding(x, padding), tangents, padding)
    out = without_padding(same_shape(x, out), padding)
    # (B, T, D, D), the transposed blocks: row r is J_ii times the r-th direction.
    blocks = without_padding(pushed, padding).movedim(0, -2)
    blocks = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
    return out, torch.linalg.slogdet(one.to(blocks.dtype) + blocks).logabsdet.sum(-1)
