"""Positions that keep the certificate: causal ALiBi slopes and rotary isometries."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor


def default_slopes(heads: int) -> tuple[float, ...]:
    """ALiBi slopes for L2 attention: geometric from 1/2 to 1/16.

    Steeper than the slopes of dot-product models: a tied kernel prefers the token itself, so order
    must come from the slopes, and steep slopes have small gains at any length.
    """
    if heads == 1:
        return (0.25,)
    return tuple(2.0 ** (-1.0 - 3.0 * h / (heads - 1)) for h in range(heads))


def exact_slopes(slopes: Sequence[float], heads: int) -> tuple[float, ...]:
    """Slopes as float32 numbers, which the kernel uses whatever the dtype of the module.

    Raises:
        ValueError: not one positive slope per head.
    """
    given = tuple(slopes) if isinstance(slopes, Sequence) else (slopes,)
    if len(given) != heads or not all(1e-30 < s < 1e30 for s in given):
        raise ValueError(f"slopes must be {heads} positive numbers, got {given}")
    return tuple(struct.unpack("f", struct.pack("f", s))[0] for s in given)


def rotary_angles(count: int, width: int, offset: int, device: torch.device) -> tuple[Tensor, Tensor]:
    r"""Cosine and sine (count, width / 2) of :math:`i\,10000^{-2k/d}` for positions offset + i."""
    rate = 10000.0 ** (-torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)
    place = torch.arange(count, device=device, dtype=torch.float64) + offset
    angle = place[:, None] * rate
    return angle.cos(), angle.sin()


def rotate(y: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Rotates each pair of features (k, k + d/2) of token i by its angle: an isometry.

    Args:
        y: (*, N, d).
        cos: (N, d / 2).
        sin: (N, d / 2).
        back: the inverse rotation.
    """
    cos, sin = cos.to(y.dtype), sin.to(y.dtype)
    if back:
        sin = -sin
    a, b = y.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
