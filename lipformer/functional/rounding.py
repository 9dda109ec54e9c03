"""Rounding: what keeps a computed bound above the exact one (docs/theory, section 4, "Rounding").

And what keeps a product below it, and what autocast makes of a weight.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lipformer.functional.tracing import has_autocast

UNIT = 2.0**-53
"""Unit roundoff u of float64."""

ROUND_UP = 1.0 + 2.0**-50
"""Factor above the rounding errors of a few float64 operations."""

FLOOR = 1e-300
"""Bounds that are not zero stay above this, where a later factor can still enlarge them."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What the weights of a function may be stored as."""

_Value = TypeVar("_Value", float, Tensor)


def enlarge(value: _Value, terms: int = 4496) -> _Value:
    """A bound above the rounding errors of the float64 sums of ``terms`` positive numbers in it.

    The factor is 1 + 2 (terms + 8) u. Without ``terms`` it is 1 + 1e-12, ten times the error of a
    formula of a few hundred operations whose conditioning is below 10.
    """
    return value * (1.0 + 2 * (terms + 8) * UNIT)


def round_up(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The next larger number of a dtype; 0 stays 0, and what overflows is infinite. No gradient."""
    cast = value.to(dtype)
    # Decided before the conversion: a tiny bound rounds to zero, which would no longer be one.
    return torch.where(value > 0, torch.nextafter(cast, torch.full_like(cast, torch.inf)), cast)


def subnormal(dtype: torch.dtype) -> float:
    """The smallest positive number of a dtype: twice the largest rounding error below its range."""
    info = torch.finfo(dtype)
    return info.tiny * info.eps


def without_subnormals(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """A factor with zeros where a dtype has few digits left, so that rounding to it is relative.

    Factors are computed in float64 and inverse to bounds, which are infinite beyond its range.
    """
    if dtype == torch.float64:
        return factor
    return F.hardshrink(factor, torch.finfo(dtype).tiny)


def multiply_down(value: Tensor, factor: Tensor) -> Tensor:
    """``value`` times a scalar ``factor``, in the value's dtype, of a size of at most the exact one.

    The factor is lowered by eps, twice the unit of one rounding: of the product in float16, whose range
    is too small for factors, so that they multiply in float32; of the factor and of the product in
    other dtypes. Products below the range of the dtype are rounded to its next number.

    Args:
        value: any shape.
        factor: a scalar, in at least float32 unless it was stored in less.
    """
    dtype = value.dtype
    wide = torch.float32 if dtype == torch.float16 else dtype
    lowered = factor.to(torch.promote_types(factor.dtype, wide)) * (1.0 - torch.finfo(dtype).eps)
    return (value.to(wide) * without_subnormals(lowered, wide)).to(dtype)


def running_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which a matrix product takes a weight: autocast's in its region, except float64."""
    device = weight.device.type
    if weight.dtype == torch.float64 or not has_autocast(device):
        return weight.dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def is_cast(weight: Tensor) -> bool:
    """Whether autocast casts a weight, here and now."""
    return running_dtype(weight) != weight.dtype


def running(weight: Tensor) -> Tensor:
    """A weight as a matrix product takes it, here and now: cast as autocast casts it."""
    return weight.to(running_dtype(weight))
