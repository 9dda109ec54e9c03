"""The attention weights themselves, an N x N tensor: to look at, not for speed."""

from __future__ import annotations

import torch
from torch import Tensor

from lipformer.functional.attention.checks import check_attention
from lipformer.functional.attention.reference import reference_point


def l2_attention_weights(
    y: Tensor,
    *,
    is_causal: bool = False,
    window: int | None = None,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    scale: float | Tensor | None = None,
) -> Tensor:
    r"""Attention weights P of :func:`l2_attention`, with the same arguments.

    Args:
        y: (*, H, N, d).
        is_causal: see l2_attention, as for the rest.
        window: latest keys kept.
        slopes: causal ALiBi slopes (H,).
        bias: added to the logits.
        key_padding_mask: (*, N).
        scale: temperature.

    Returns:
        (*, H, N, N); rows sum to one, except that rows of padded tokens are zero.
    """
    padding, bias = check_attention(y, is_causal, window, slopes, bias, scale, key_padding_mask)
    n, d = y.shape[-2:]
    wide = torch.promote_types(y.dtype, torch.float32)
    z = y.to(wide) - reference_point(y, padding, is_causal=is_causal).to(wide)
    if padding is not None:
        z = z.masked_fill(padding[..., None, :, None], 0.0)
    temperature = d**-0.5 if scale is None else scale
    square = z.square().sum(-1)
    logits = temperature * (2 * (z @ z.mT) - square.unsqueeze(-2) - square.unsqueeze(-1))
    place = torch.arange(n, device=y.device)
    lag = place[:, None] - place
    if slopes is not None:
        logits = logits - slopes.to(wide)[:, None, None] * lag
    if bias is not None:
        logits = logits + bias
    if is_causal:
        hidden = lag < 0 if window is None else (lag < 0) | (lag >= window)
        logits = logits.masked_fill(hidden, -torch.inf)
    if padding is not None:
        # A padded query keeps its own key here only so that no row is empty; it is zeroed below.
        own = torch.eye(n, dtype=torch.bool, device=y.device)
        logits = logits.masked_fill(padding[..., None, None, :] & ~own, -torch.inf)
    weights = logits.softmax(-1)
    if padding is not None:
        weights = weights.masked_fill(padding[..., None, :, None], 0.0)
    return weights.to(y.dtype)
