"""Intervals of float64 tensors: each operation encloses the exact result, whatever the rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# torch's exp, log and cosh are good to a unit in the last place or two; four are allowed for.
_ELEMENTARY = 2.0**-50
# Covers what underflows.
_TINY = 1e-300
_INFINITY = torch.tensor(math.inf, dtype=torch.float64)


def up(value: Tensor) -> Tensor:
    """The next larger number: above the exact result of one rounded +, -, *, / or square root."""
    return torch.nextafter(value, _INFINITY)


def down(value: Tensor) -> Tensor:
    """The next smaller number."""
    return torch.nextafter(value, -_INFINITY)


@dataclass(frozen=True)
class Interval:
    """All numbers from ``low`` to ``high``, elementwise; ends may be infinite."""

    low: Tensor
    high: Tensor

    @staticmethod
    def of(low: Tensor | float, high: Tensor | float | None = None) -> Interval:
        """The interval between two floats or tensors, by default a point."""
        first = torch.as_tensor(low, dtype=torch.float64)
        return Interval(first, first if high is None else torch.as_tensor(high, dtype=torch.float64))

    def __add__(self, other: Interval | float) -> Interval:
        other = _interval(other)
        return Interval(down(self.low + other.low), up(self.high + other.high))

    __radd__ = __add__

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low)

    def __sub__(self, other: Interval | float) -> Interval:
        return self + -_interval(other)

    def __rsub__(self, other: float) -> Interval:
        return _interval(other) + -self

    def __mul__(self, other: Interval | float) -> Interval:
        other = _interval(other)
        if bool((self.low >= 0).all()) and bool((other.low >= 0).all()):
            low = down(self.low * other.low).clamp_min(0.0)
            return Interval(low, up(self.high * other.high))
        products = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]
        low = torch.minimum(torch.minimum(*products[:2]), torch.minimum(*products[2:]))
        high = torch.maximum(torch.maximum(*products[:2]), torch.maximum(*products[2:]))
        return Interval(down(low), up(high))

    __rmul__ = __mul__

    def inverse(self) -> Interval:
        """1/x for x >= 0; 1/0 is infinite."""
        return Interval(down(1 / self.high), up(1 / self.low))

    def __truediv__(self, other: Interval | float) -> Interval:
        return self * _interval(other).inverse()

    def __rtruediv__(self, other: float) -> Interval:
        return other * self.inverse()

    def abs(self) -> Interval:
        low, high = self.low.abs(), self.high.abs()
        straddles = (self.low < 0) & (self.high > 0)
        return Interval(torch.minimum(low, high).masked_fill(straddles, 0.0), torch.maximum(low, high))

    def square(self) -> Interval:
        size = self.abs()
        return Interval(down(size.low * size.low).clamp_min(0.0), up(size.high * size.high))

    def sqrt(self) -> Interval:
        """The square root of x >= 0."""
        return Interval(down(self.low.sqrt()).clamp_min(0.0), up(self.high.sqrt()))

    def exp(self) -> Interval:
        return _enclose(self.low.exp(), self.high.exp())

    def log(self) -> Interval:
        return _enclose(self.low.log(), self.high.log())

    def cosh(self) -> Interval:
        """cosh x for x >= 0, where it increases."""
        return _enclose(self.low.cosh(), self.high.cosh())

    def minimum(self, other: Interval | float) -> Interval:
        other = _interval(other)
        return Interval(torch.minimum(self.low, other.low), torch.minimum(self.high, other.high))

    def maximum(self, other: Interval | float) -> Interval:
        other = _interval(other)
        return Interval(torch.maximum(self.low, other.low), torch.maximum(self.high, other.high))

    def amax(self) -> Interval:
        """The largest of all elements."""
        return Interval(self.low.amax(), self.high.amax())

    def top(self) -> Interval:
        """The upper end as a point."""
        return Interval(self.high, self.high)


def _interval(value: Interval | float) -> Interval:
    return value if isinstance(value, Interval) else Interval.of(value)


def _enclose(low: Tensor, high: Tensor) -> Interval:
    return Interval(
        torch.where(low.isinf(), low, low - low.abs() * _ELEMENTARY - _TINY),
        torch.where(high.isinf(), high, high + high.abs() * _ELEMENTARY + _TINY),
    )
