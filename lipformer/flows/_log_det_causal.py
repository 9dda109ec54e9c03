"""The exact log-determinant of causal and token-wise branches, token by token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipformer.flows._own_blocks import push_own, unknown_parts
from lipformer.flows._pullback import without_padding
from lipformer.layers._residual import same_shape


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
