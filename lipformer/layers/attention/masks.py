"""Which mask a call of L2 attention asks for, and whether the layer's certificate covers it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lipformer.functional.attention.checks import OWN_KEY_RULE
from lipformer.functional.tracing import values_readable


class Mask(NamedTuple):
    """What remains of attn_mask and is_causal: a flag, or an additive bias, or both."""

    is_causal: bool
    bias: Tensor | None


def additive(attn_mask: Tensor, batch: int, heads: int, n: int, dtype: torch.dtype) -> Tensor:
    """nn.MultiheadAttention's attn_mask as a bias that broadcasts to (B, H, N, N).

    Args:
        attn_mask: (N, N) or (B H, N, N); bool with True at hidden keys, or added to the logits.
        batch: B.
        heads: H.
        n: N.
        dtype: of the bias.
    """
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor or None, got {type(attn_mask).__name__}")
    if attn_mask.shape not in ((n, n), (batch * heads, n, n)):
        raise ValueError(
            f"attn_mask must have shape {(n, n)} or {(batch * heads, n, n)}, "
            f"got {tuple(attn_mask.shape)}"
        )
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=dtype).masked_fill(attn_mask, -torch.inf)
    elif not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask must be bool or floating-point, got {attn_mask.dtype}")
    return (
        attn_mask.to(dtype).unflatten(0, (batch, heads)) if attn_mask.ndim == 3 else attn_mask.to(dtype)
    )


def resolve(
    attn_mask: Tensor | None,
    is_causal: bool,
    *,
    causal: bool | None,
    any_mask: bool,
    batch: int,
    heads: int,
    n: int,
    dtype: torch.dtype,
) -> Mask:
    """Turns a call's masks into what the kernel runs, or refuses what the certificate excludes.

    Args:
        attn_mask: the call's mask or None.
        is_causal: the call's flag; with a mask it is the hint that the mask is the causal one.
        causal: the layer's setting: True always masks, False never, None either way.
        any_mask: the layer's setting: other masks are allowed.
        batch: B.
        heads: H.
        n: N.
        dtype: of the input.
    """
    if causal is False and is_causal:
        raise ValueError(
            "is_causal=True, but the layer was built with causal=False and certified without a mask; "
            "build it with causal=True or causal=None"
        )
    always = bool(causal) or is_causal
    if attn_mask is None:
        return Mask(always, None)
    bias = additive(attn_mask, batch, heads, n, dtype)
    readable = values_readable(bias)
    if is_causal and not readable:
        return Mask(True, None)
    later = torch.ones(n, n, dtype=torch.bool, device=bias.device).triu(1)
    empty = (bias == 0).all()
    is_triangle = (bias == torch.zeros_like(bias).masked_fill(later, -torch.inf)).all()
    if readable and bool(empty):
        return Mask(always, None)
    if readable and causal is not False and bool(is_triangle):
        return Mask(True, None)
    own = torch.diagonal(bias, dim1=-2, dim2=-1).unsqueeze(-1)
    covered = bias <= own if any_mask else empty if causal is False else empty | is_triangle
    if not readable:
        # Without a look at the values: what the certificate excludes gives no finite output.
        return Mask(always, bias.masked_fill(~covered, torch.nan))
    if not any_mask:
        raise ValueError(
            "attn_mask is neither empty nor the causal mask (True or -inf above the diagonal, nothing "
            "elsewhere) that this layer is certified for "
            f"(causal={causal}, any_mask=False); build the layer with any_mask=True, whose certificate "
            "covers every mask that leaves each token its own key"
        )
    hidden = (own == -torch.inf).nonzero()
    if len(hidden):
        raise ValueError(f"attn_mask hides token {int(hidden[0, -2])}'s own key: {OWN_KEY_RULE}")
    if not bool(covered.all()):
        raise ValueError(
            "any_mask=True is certified for masks that lower logits: no entry of attn_mask may "
            "exceed the diagonal entry of its row"
        )
    return Mask(always, bias)
