r"""Proven maxima over D for Theorems A+, B+, A++, B++ and C+.

A row's sum :math:`D = 1 + u` of kernel values lies in [1, 1 + B]. All weights of these theorems
are sums of terms

.. math:: c\, u^p (1 + x L)^q (1 + u)^{-s}, \qquad L = \ln(B / u), \quad c > 0, \; s \ge p \ge q.

In :math:`v = \ln u` the logarithm of such a term is
:math:`\ln c + p v + q \ln(1 + x (\ln B - v)) - s \ln(1 + e^v)`, a sum of concave functions. So a
term has one maximum and lies below the exponential of any of its tangents: that is what makes the
maxima here upper bounds and not samples.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

# (c, p, q, s) of one term.
Term = tuple[float, int, int, int]

# A row of smaller mass than this is treated as if it had this mass: a larger bound, by 1e-17.
MIN_LOG_MASS = -40.0

_GOLDEN = (math.sqrt(5) - 1) / 2


def product(first: Sequence[Term], second: Sequence[Term]) -> list[Term]:
    """Multiplies two sums of terms out."""
    return [
        (c1 * c2, p1 + p2, q1 + q2, s1 + s2) for c1, p1, q1, s1 in first for c2, p2, q2, s2 in second
    ]


def log_term(term: Term, x: float, log_b: float, v: float) -> tuple[float, float]:
    """Computes the logarithm of a term at v = ln u, and its slope in v."""
    c, p, q, s = term
    affine = 1 + x * (log_b - v)
    value = math.log(c) + p * v + q * math.log(affine) - s * _softplus(v)
    return value, p - q * x / affine - s * _sigmoid(v)


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


def max_of_terms(
    terms: Sequence[Term], x: float, log_b: float, rtol: float = 1e-10, max_cells: int = 4000
) -> float:
    """Bounds the maximum over u in [0, B] of a sum of terms from above.

    Branch and bound. On a cell of v = ln u each term lies below the exponential of its tangent at
    the centre; the sum of these is convex, so its maximum over the cell is at an end. The excess
    is of second order in the cell's width, so that few cells are needed. Whenever it stops, the
    largest bound left is valid.

    Args:
        terms: The sum.
        x: The free parameter x > 0 of the theorems.
        log_b: ln B.
        rtol: Largest relative excess over the true maximum.
        max_cells: Stop after so many cells whatever the excess.
    """

    def cell(a: float, b: float) -> tuple[float, float]:
        """The upper bound on [a, b] and the value at its centre."""
        v, half = (a + b) / 2, (b - a) / 2
        affine = 1 + x * (log_b - v)
        log_affine, softplus = math.log(affine), _softplus(v)
        slope, sigmoid = x / affine, _sigmoid(v)
        value = left = right = 0.0
        for c, p, q, s in terms:
            f = c * math.exp(p * v + q * log_affine - s * softplus)
            rise = (p - q * slope - s * sigmoid) * half
            if abs(rise) > 600:
                return math.inf, f
            value += f
            left += f * math.exp(-rise)
            right += f * math.exp(rise)
        return max(left, right), value

    # Below `bottom` u is under 1e-17: terms with p = 0 are at most c there, the others increase.
    bottom = min(log_b, 0.0) - 40
    at_bottom = sum(
        c if p == 0 else math.exp(log_term((c, p, q, s), x, log_b, bottom)[0]) for c, p, q, s in terms
    )
    bound, best = cell(bottom, log_b)
    best = max(best, at_bottom)
    heap = [(-bound, bottom, log_b)]
    for _ in range(max_cells):
        if -heap[0][0] <= best * (1 + rtol):
            break
        _, a, b = heapq.heappop(heap)
        middle = (a + b) / 2
        for left, right in ((a, middle), (middle, b)):
            bound, value = cell(left, right)
            best = max(best, value)
            heapq.heappush(heap, (-bound, left, right))
    return max(at_bottom, -heap[0][0])


def sample_rows(log_b: float, count: int = 28) -> list[tuple[float, float]]:
    """Lists (1/D, L) on a grid that covers the maxima, for choosing x (any x is valid)."""
    # The maxima lie below D = 2 ln B + 4 (docs/theory, A+ and B+: the stationary points).
    top = min(log_b, math.log(2 * max(log_b, 0.0) + 4))
    bottom = min(log_b, 0.0) - 4
    grid = (bottom + (top - bottom) * i / (count - 1) for i in range(count))
    return [(_sigmoid(-v), log_b - v) for v in grid]


def best_x(objective: Callable[[float], float], rounds: int = 12) -> float:
    """Searches the x in [0.3, 6.5] with the smallest objective, by golden section in ln x.

    The objectives are sums, products, powers and maxima of posynomials in x, hence unimodal in
    ln x (B++ subtracts a small one). Every x gives a valid bound: only tightness rests on this.
    """
    low, high = math.log(0.3), math.log(6.5)
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    f_a, f_b = objective(math.exp(a)), objective(math.exp(b))
    for _ in range(rounds):
        if f_a <= f_b:
            high, b, f_b = b, a, f_a
            a = high - _GOLDEN * (high - low)
            f_a = objective(math.exp(a))
        else:
            low, a, f_a = a, b, f_b
            b = low + _GOLDEN * (high - low)
            f_b = objective(math.exp(b))
    return math.exp(a if f_a <= f_b else b)


def _softplus(v: float) -> float:
    """ln(1 + e^v) without overflow."""
    return max(v, 0.0) + math.log1p(math.exp(-abs(v)))


def _sigmoid(v: float) -> float:
    """e^v / (1 + e^v) without overflow."""
    return 1 / (1 + math.exp(-v)) if v > -700 else math.exp(v)
