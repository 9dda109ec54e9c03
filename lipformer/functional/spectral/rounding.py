"""Exact rescaling, margins and rounding up, shared by the bounds of a spectral norm.

Where a process flushes denormals (torch.set_flush_denormal), subnormal weights count as the zeros
that every kernel then reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipformer.functional.rounding import UNIT, round_up

_EXPONENT_BITS = 0x7FF0000000000000


def bound_dtype(weight: Tensor) -> torch.dtype:
    """dtype in which a bound is returned: the weight's, but at least float32."""
    return torch.promote_types(weight.dtype, torch.float32)


def rescale(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weight in float64, divided by a power of two near its largest entry.

    Both the conversion and the division are exact (up to entries some 1e-300 of the largest), so
    neither squares nor sums of squares can overflow or underflow afterwards. The power is cut out
    of the bits of a float64, because exp2 and log2 need not be exact. It is kept within
    2^-1022..2^1022 so that its inverse is a normal number too.

    Args:
        weight: (*, m, n) with m, n >= 1.

    Returns:
        a (*, m, n) in float64, scale (*,) with weight = scale a, and top (*,) = max|weight|, which
        is NaN or infinite if any entry is.
    """
    w = weight.detach()
    top = torch.maximum(w.amax(dim=(-2, -1)), -w.amin(dim=(-2, -1))).double()
    power = (top.view(torch.int64) & _EXPONENT_BITS).view(torch.float64)
    scale = power.clamp(min=2.0**-1022, max=2.0**1022)
    # Converted first: a product of two dtypes takes a path that is twenty times slower.
    a = weight.to(torch.float64, copy=True).mul_(scale.reciprocal()[..., None, None])
    return a, scale, top


def frobenius_norm(matrix: Tensor) -> Tensor:
    """The Frobenius norm (*, m, n) -> (*,) in float64, whose squares stay in range."""
    if not matrix.numel():
        return matrix.sum((-2, -1), dtype=torch.float64)
    a, scale, _ = rescale(matrix)
    return scale * torch.linalg.matrix_norm(a)


def tall(a: Tensor, like: Tensor | None = None) -> Tensor:
    """Transpose a if like (by default a itself) has more columns than rows.

    All work is done on the tall form, whose Gram matrix a^T a is the smaller one, and tall(., like)
    takes the result back.
    """
    rows, columns = (a if like is None else like).shape[-2:]
    return a if rows >= columns else a.mT


def gram_margin(k: int, n: int) -> float:
    """Relative rounding margin eta = 16 n (k + n + 8) u for an n x n Gram matrix of k-vectors.

    4e-9 at k = n = 1024. The proofs (`verified_square`, `schatten_norm`)
    count at most eta / 4 of rounding error in the square of a norm, and taking the root and
    multiplying by 1 + eta adds some units u. The rest is spare, for kernels that regroup a
    factorisation (inverting diagonal blocks, say) and so lose a small constant.
    """
    return 16.0 * n * (k + n + 8) * UNIT


def restore(bound: Tensor, scale: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
    """scale * bound as the next larger number of dtype; 0 stays 0 and non-finite weights stay so.

    scale * bound is exact or overflows to infinity (a valid bound) or is subnormal. There, and in
    the conversion, one rounding to nearest is made up for by the step to the next number.
    """
    return torch.where(torch.isfinite(top), round_up(scale * bound, dtype), top.to(dtype))
