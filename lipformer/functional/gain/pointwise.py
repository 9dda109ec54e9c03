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
from typing import NamedTuple

from lipformer.functional.gain.maxima import (
    MIN_LOG_MASS,
    Term,
    best_x,
    log_term,
    max_of_concave,
)
from lipformer.functional.gain.rows import log_mass, theorem_e
from lipformer.functional.rounding import enlarge

# theta / D as a term (c, p, q, s) in u = D - 1.
_RATIO: Term = (1.0, 1, 1, 2)
# ALiBi entries are grouped so that a group spans at most this much of the bias.
_GROUP_SPAN = 1 / 16


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
            value, slope = log_term(_RATIO, self.x, self.log_b, v)
            if slope >= 0:  # a larger D is allowed: the maximum of theta/D
                value, slope = self.log_ratio, 0.0
            stretch = 1 + slope_of_entry * (b - v)
            return value + v + math.log(stretch), slope + 1 - slope_of_entry / stretch

        # k <= e^b <= B, up to rounding of ln B
        return math.exp(max_of_concave(log_value, min(b, self.log_b), rounds=12))


def pointwise(x: float, log_b: float) -> Pointwise:
    """Prepares q for a given x > 0 and ln B."""
    log_b = max(log_b, MIN_LOG_MASS)
    ratio = max_of_concave(lambda v: log_term(_RATIO, x, log_b, v), log_b)
    t = max(0.0, 1 - x / 4)  # where e^-t (1 + 4t/x) is largest
    # Bisect for the maximum of theta/D, keeping the end where theta/D still increases.
    low, high = min(log_b, 0.0) - 60, log_b
    for _ in range(40):
        middle = (low + high) / 2
        if log_term(_RATIO, x, log_b, middle)[1] >= 0:
            low = middle
        else:
            high = middle
    return Pointwise(x, log_b, ratio, math.log1p(4 * t / x) - t, low + t)


def alibi_column(q: Pointwise, n: float, slope: float) -> float:
    r"""Bounds :math:`\sum_{\tau=1}^{n-1} q(-\mathrm{slope}\,\tau)`; n may be ``math.inf``.

    :math:`e^{-b} q(b) = \max_t R(1 + e^{b-t}) e^{-t} (1 + 4t/x)` decreases in b, so a group of
    consecutive entries is bounded by that factor at its last one times the sum of its
    :math:`e^b`.
    """
    nonlinear = min(n - 1, max(0, math.ceil(-q.linear / slope) - 1))
    size = max(1, int(_GROUP_SPAN / slope))
    total, first = 0.0, 1
    while first <= nonlinear:
        last = min(first + size - 1, int(nonlinear))
        total += (
            q.entry(-slope * last)
            * math.exp(slope * (last - first))
            * _geometric(slope, last - first + 1)
        )
        first = last + 1
    rest = math.exp(q.log_ratio + q.log_kappa - slope * first)
    return total + rest * _geometric(slope, n - first)


def _geometric(slope: float, count: float) -> float:
    """1 + e^-slope + ... with `count` terms."""
    return math.expm1(-slope * count) / math.expm1(-slope)


def theorem_c_plus(n: float, slope: float = 0.0) -> float:
    """Bounds the gain for every 0/1 mask, or for causal ALiBi, entry by entry (Theorem C+).

    Args:
        n: Largest number of ones in a row or column of the mask, the diagonal included; the
            number of tokens or the window with ALiBi, where it may be ``math.inf``.
        slope: The ALiBi slope; 0 stands for any mask that keeps the diagonal.

    Returns:
        The gain, rounded up.
    """
    log_b = log_mass(n, slope)

    def column(x: float) -> float:
        q = pointwise(x, log_b)
        return alibi_column(q, n, slope) if slope else (n - 1) * q.entry(0.0)

    return enlarge(theorem_e(log_b) + math.sqrt(column(best_x(column, rounds=9))))
