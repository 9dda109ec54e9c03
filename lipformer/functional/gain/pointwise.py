r"""Theorem C+: the gain in the l2 norm for any mask or bias, entry by entry with row weights.

For a bias with :math:`b_{ii} = 0` and rows of mass at most B, and every x > 0,

.. math:: G_2 \le G_{self}(B) + \sqrt{\max_j \sum_{i \ne j} q(b_{ij})}, \qquad
    q(b) = \max_{k \le e^b,\; D \ge 1 + k} \tfrac{\theta(D)}{D}\, k\, (1 + \tfrac4x (b - \ln k)),

with :math:`\theta = 1 - 1/D + x h(D)`, :math:`h(D) = (1 - 1/D) \ln(B/(D-1))` (docs/theory, Theorem C+).

How q is computed: in :math:`v = \ln k` the logarithm of
:math:`\max_{D \ge 1+k} \theta/D = \max_{u \ge k} u (1 + x L)/(1+u)^2` is concave (constant up to
the maximum of a log-concave function, then that function), and so are v and
:math:`\ln(1 + \frac4x (b - v))`. For small b the maximum lies where the first is constant, and
:math:`q(b) = r \kappa e^b` with :math:`r = \max_D \theta/D` and
:math:`\kappa = \max_t e^{-t} (1 + 4t/x)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

# A row of smaller mass than this is treated as if it had this mass: a larger bound, by 1e-17.
_MIN_LOG_MASS = -40.0


def max_of_concave(
    value_and_slope: Callable[[float], tuple[float, float]], top: float, rounds: int = 20
) -> float:
    """Bounds the maximum of a concave function on (-inf, top] from above.

    Bisection brackets the maximum by the sign of the slope; then either tangent bounds it. The
    excess is about the square of the bracket, 4^-rounds.

    Args:
        value_and_slope: The function and its derivative; the slope is positive far to the left.
        top: The right end of the domain.
        rounds: Number of bisections of a bracket of length about 1.
    """
    high, (f_high, s_high) = top, value_and_slope(top)
    if s_high >= 0:
        return f_high
    step = 1.0
    while True:
        low = high - step
        f_low, s_low = value_and_slope(low)
        if s_low >= 0:
            break
        high, f_high, s_high = low, f_low, s_low
        step *= 2
    for _ in range(rounds):
        middle = (low + high) / 2
        f, s = value_and_slope(middle)
        if s >= 0:
            low, f_low, s_low = middle, f, s
        else:
            high, f_high, s_high = middle, f, s
    return min(f_low + s_low * (high - low), f_high - s_high * (high - low))


def _log_ratio(x: float, log_b: float, v: float) -> tuple[float, float]:
    """ln(theta/D) = v + ln(1 + x (ln B - v)) - 2 ln(1 + e^v) at v = ln u, concave, and its slope."""
    affine = 1 + x * (log_b - v)
    softplus = max(v, 0.0) + math.log1p(math.exp(-abs(v)))
    sigmoid = 1 / (1 + math.exp(-v)) if v > -700 else math.exp(v)
    return v + math.log(affine) - 2 * softplus, 1 - x / affine - 2 * sigmoid


class Pointwise(NamedTuple):
    """q(b) for one x and one mass: `entry` computes it, `linear` says where it is r kappa e^b."""

    x: float
    log_b: float
    log_ratio: float  # ln r
    log_kappa: float
    linear: float  # q(b) = r kappa e^b for b up to here

    def entry(self, b: float) -> float:
        """Bounds q(b) from above."""
        if b <= self.linear:
            return math.exp(self.log_ratio + self.log_kappa + b)
        slope_of_entry = 4 / self.x

        def log_value(v: float) -> tuple[float, float]:
            value, slope = _log_ratio(self.x, self.log_b, v)
            if slope >= 0:  # a larger D is allowed: the maximum of theta/D
                value, slope = self.log_ratio, 0.0
            stretch = 1 + slope_of_entry * (b - v)
            return value + v + math.log(stretch), slope + 1 - slope_of_entry / stretch

        # k <= e^b <= B, up to rounding of ln B
        return math.exp(max_of_concave(log_value, min(b, self.log_b), rounds=12))


def pointwise(x: float, log_b: float) -> Pointwise:
    """Prepares q for a given x > 0 and ln B."""
    log_b = max(log_b, _MIN_LOG_MASS)
    ratio = max_of_concave(lambda v: _log_ratio(x, log_b, v), log_b)
    t = max(0.0, 1 - x / 4)  # where e^-t (1 + 4t/x) is largest
    # Bisect for the maximum of theta/D, keeping the end where theta/D still increases.
    low, high = min(log_b, 0.0) - 60, log_b
    for _ in range(40):
        middle = (low + high) / 2
        if _log_ratio(x, log_b, middle)[1] >= 0:
            low = middle
        else:
            high = middle
    return Pointwise(x, log_b, ratio, math.log1p(4 * t / x) - t, low + t)
