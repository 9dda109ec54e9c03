"""Rounding up: what keeps a computed bound above the exact one (docs/theory, section 4, "Rounding")."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

UNIT = 2.0**-53
"""Unit roundoff u of float64."""

ROUND_UP = 1.0 + 2.0**-50
"""Factor above the rounding errors of a few float64 operations."""

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
