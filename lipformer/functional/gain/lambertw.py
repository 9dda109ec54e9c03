"""The principal branch of the Lambert W function, in plain Python and in torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# exp(y) is a normal float64 above this, so that nothing is lost to underflow.
_SMALLEST_LOG = -700.0


def lambert_w0(x: float) -> float:
    r"""Computes :math:`W_0(x)`, the solution :math:`w \ge -1` of :math:`w e^w = x`.

    The relative error is a few units in the last place for :math:`x \ge 0`. Near the branch point
    :math:`-1/e` the function itself is ill-conditioned and the error follows its condition number.

    Args:
        x: A number :math:`x \ge -1/e`; ``math.inf`` gives ``math.inf``.

    Returns:
        :math:`W_0(x)`.

    Example:
        >>> lambert_w0(0.0)
        0.0
        >>> abs(lambert_w0(math.e) - 1.0) < 1e-15
        True
    """
    x = float(x)
    if not x >= -1 / math.e:
        raise ValueError(f"lambert_w0 needs x >= -1/e = {-1 / math.e!r}, got {x!r}")
    if x == 0 or x == math.inf:
        return x
    if x > math.e:
        return _omega_above_one(math.log(x))
    # Start: the branch-point series for x < 0, else log(1 + x), which is W_0 to first order in x.
    if x < 0:
        p = math.sqrt(max(0.0, 2 * (math.e * x + 1)))
        w = -1 + p - p * p / 3 + 11 / 72 * p**3
    else:
        w = math.log1p(x)
    for _ in range(16):  # Halley: cubic convergence, 3 or 4 rounds from these starts
        excess = w - x * math.exp(-w)
        if w <= -1:
            return -1.0
        step = excess / (1 + w - excess * (w + 2) / (2 * w + 2))
        w -= step
        if abs(step) <= 1e-16 * abs(w):
            break
    return w


def wright_omega(y: float) -> float:
    r"""Computes :math:`\omega(y) = W_0(e^y)`, the solution of :math:`w + \ln w = y`.

    Use it where :math:`e^y` may overflow. The relative error is a few units in the last place.

    Args:
        y: Any number; ``-math.inf`` gives 0.

    Returns:
        :math:`W_0(e^y)`.
    """
    y = float(y)
    if y == math.inf:
        return y
    return _omega_above_one(y) if y > 1 else lambert_w0(math.exp(y))


def _omega_above_one(y: float) -> float:
    """Newton's method for w + ln w = y, y >= 1, in the well-conditioned logarithmic form."""
    w = y - math.log(y) if y > 2 else 1.0
    for _ in range(16):
        new = w * ((1 + y - math.log(w)) / (1 + w))
        if abs(new - w) <= 2e-16 * new:
            return new
        w = new
    return w


def wright_omega_tensor(y: Tensor) -> Tensor:
    r"""Computes :math:`\omega(y) = W_0(e^y)` elementwise in float64 (no gradient).

    Newton's method for :math:`f(\zeta) = e^\zeta + \zeta - y`, with :math:`w = e^\zeta`. f is
    convex and increasing, so the iteration descends to the root after its first step and cannot
    leave it. The relative error is about :math:`2^{-52} \max(4, |y|)`.

    Args:
        y: Any shape (*); ``-inf`` gives 0.

    Returns:
        A float64 tensor of shape (*).
    """
    y = y.detach().double()
    clamped = y.clamp_min(_SMALLEST_LOG)
    zeta = torch.where(clamped > 1, clamped.clamp_min(1).log(), clamped)
    for _ in range(8):
        power = zeta.exp()
        zeta = zeta - (power + zeta - clamped) / (power + 1)
    return torch.where(y < _SMALLEST_LOG, y.exp(), zeta.exp())
