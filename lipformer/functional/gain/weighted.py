r"""The gain in the l2 norm with row weights: Theorems A+, B+ and, sharper for most n, A++ and B++.

All of them (docs/theory) bound, for row weights :math:`\theta_i` and a free x > 0, the column sum

.. math:: Q = \max_j \sum_i \theta_i P_{ij} (1 + \tfrac{4}{x} s_{ij}^2) = \max_j (S + 4c/x).

With the own key inside (A+, B+), :math:`\theta = 1 + x h(D)` and i runs over all rows; with the own key
apart (A++, B++), :math:`\theta = 1 - 1/D + x h(D)` and i runs over the rows other than j;
:math:`h(D) = (1 - 1/D) \ln(B/(D-1))`.
"""

from __future__ import annotations

import math

from lipformer.functional.gain.maxima import (
    MIN_LOG_MASS,
    Term,
    best_x,
    max_of_terms,
    product,
    sample_rows,
)
from lipformer.functional.gain.rows import log_mass, spread, theorem_e
from lipformer.functional.rounding import enlarge

# Terms (c, p, q, s) in u = D - 1: theta with the own key apart, 1/D, 1 - 1/D and (D - 1)/D^2.
_APART: list[Term] = [(1.0, 1, 1, 1)]
_INVERSE: list[Term] = [(1.0, 0, 0, 1)]
_COMPLEMENT: list[Term] = [(1.0, 1, 0, 1)]
_NEIGHBOURS: list[Term] = [(1.0, 1, 0, 2)]

# max over t of e^-t (1 + 2t + 2t^2 + 4t^3/3) is 3.2487 (docs/theory, A+ step 4).
_ETA = 3.25


def theta_terms(own: bool) -> list[Term]:
    """The row weight theta as terms; `own` says whether the own key is inside the sum."""
    return _APART + _INVERSE if own else _APART


def max_ratio(own: bool, x: float, log_b: float) -> float:
    r"""Bounds :math:`r = \max_D \theta / D`."""
    return max_of_terms(product(theta_terms(own), _INVERSE), x, log_b)


def unmasked_column(rows: float, log_b: float, own: bool) -> float:
    """Bounds Q without a mask, by the smaller of A+'s two ways (docs/theory), each with its best x."""
    log_b = max(log_b, MIN_LOG_MASS)
    samples = sample_rows(log_b)
    inside = 1.0 if own else 0.0
    eta = _ETA if own else _ETA - 1
    squared = product(theta_terms(own), theta_terms(own))

    def by_norm(x: float, g1: float) -> float:
        return math.sqrt((1 + 8 / x**2) * rows * g1)

    def by_powers(x: float, r: float, g2: float) -> float:
        beta = eta * r
        return beta / 2 + math.sqrt((1 + 8 / x**2) * (rows * g2 + beta**2 / 4))

    def thetas(x: float) -> list[tuple[float, float]]:
        return [(d, (1 - d) * (1 + x * big_l) + inside * d) for d, big_l in samples]

    def sampled_norm(x: float) -> float:
        return by_norm(x, max(t * t * d for d, t in thetas(x)))

    def sampled_powers(x: float) -> float:
        weights = thetas(x)
        r = max(inside, max(t * d for d, t in weights))
        return by_powers(x, r, max(t * t * d * (1 - d) for d, t in weights))

    x, y = best_x(sampled_norm), best_x(sampled_powers)
    results = []
    if sampled_norm(x) < 1.01 * sampled_powers(y):
        results.append(by_norm(x, max_of_terms(product(squared, _INVERSE), x, log_b)))
    if sampled_powers(y) < 1.01 * sampled_norm(x):
        g2 = max_of_terms(product(squared, _NEIGHBOURS), y, log_b)
        results.append(by_powers(y, max_ratio(own, y, log_b), g2))
    return min(results)


def causal_column(rows: float, slope: float, log_b: float, own: bool) -> float:
    r"""Bounds Q for a causal mask with its best x; with ALiBi as a sum over blocks of rows.

    .. math:: \sqrt{(1+8/x^2) M} \sum f \sqrt l, \qquad
        \sum f \left(\sqrt{(1+8/x^2)(l M + r^2 f^2)} - r f\right)

    own key inside and apart, M the growth of B+ a row, blocks of l rows from row o on,
    :math:`f = e^{-\mathrm{slope}(o-j)}` (docs/theory, "ALiBi in Theorems B, B+ and B++").

    Args:
        rows: Number of rows that see a key, its own row included if `own`; may be ``math.inf``.
        slope: The ALiBi slope; 0 means none and needs finite rows.
        log_b: ln B.
        own: Whether the own key is inside the sum.
    """
    log_b = max(log_b, MIN_LOG_MASS)
    samples = sample_rows(log_b)
    inside = 1.0 if own else 0.0
    theta = theta_terms(own)
    lengths = _block_lengths(rows, slope)

    def column(x: float, r: float, growth: float, length: float) -> float:
        factor = 1 + 8 / x**2
        if own:
            return math.sqrt(factor * growth) * block_sum(rows, slope, length)
        return _apart_blocks(rows, slope, length, r, growth, factor)

    def sampled(x: float) -> float:
        weights = [(d, (1 - d) * (1 + x * big_l) + inside * d) for d, big_l in samples]
        r = max(inside, max(t * d for d, t in weights))
        growth = max(2 * r * t * (1 - d) + (t * d) ** 2 for d, t in weights)
        return column(x, r, growth, typical)

    typical = min(lengths, key=lambda length: block_sum(rows, slope, length))
    x = best_x(sampled)
    r = max_ratio(own, x, log_b)
    scaled = [(2 * r * c, p, q, s) for c, p, q, s in product(theta, _COMPLEMENT)]
    ratio = product(theta, _INVERSE)
    growth = max_of_terms(scaled + product(ratio, ratio), x, log_b)
    return min(column(x, r, growth, length) for length in lengths)


def best_block_sum(rows: float, slope: float) -> float:
    r"""Minimises :math:`\sum f \sqrt l` over the block length; it is sqrt(rows) without ALiBi."""
    return min(block_sum(rows, slope, length) for length in _block_lengths(rows, slope))


def block_sum(rows: float, slope: float, length: float) -> float:
    r"""Sums :math:`e^{-\mathrm{slope}\, o} \sqrt{l}` over the blocks of rows, o = 0, l, 2l, ...

    For rows = inf it is :math:`\sqrt l / (1 - e^{-\mathrm{slope}\, l})`. The last block is shorter
    where the length does not divide the rows.
    """
    if length >= rows:
        return math.sqrt(rows)
    whole = math.inf if rows == math.inf else rows // length
    # sqrt(l) is the cost of a block, and the decay over all whole blocks is e^(-slope l whole)
    decay = math.exp(-slope * length * whole)
    rest = 0.0 if rows == math.inf else decay * math.sqrt(rows - whole * length)
    return math.sqrt(length) * (1 - decay) / -math.expm1(-slope * length) + rest


def _block_lengths(rows: float, slope: float) -> list[float]:
    """Block lengths worth trying: sqrt(l)/(1 - e^(-slope l)) is least at slope l = 1.2564."""
    if slope == 0:
        return [rows]
    tried = {max(1.0, float(round(c / slope))) for c in (0.6, 0.8, 1.0, 1.2564, 1.5, 1.9)}
    finite = [rows] if rows < math.inf else []
    return sorted(length for length in tried if length < rows) + finite


def _apart_blocks(
    rows: float, slope: float, length: float, r: float, growth: float, factor: float
) -> float:
    """The sum over blocks of Q's bound with the own key apart, see `causal_column`."""
    total, start = 0.0, 0.0
    for _ in range(48):
        if start >= rows:
            return total
        f = math.exp(-slope * (start + 1))
        size = min(length, rows - start)
        total += f * (math.sqrt(factor * (size * growth + (f * r) ** 2)) - f * r)
        start += size
    # What is left decays from e^-28 on: each block without its gain r f, for ever.
    f = math.exp(-slope * (start + 1))
    return total + f * math.sqrt(factor * length * growth) / -math.expm1(-slope * length)


def theorem_a_plus(n: float) -> float:
    """Bounds the gain without a mask (docs/theory, Theorem A+), rounded up."""
    log_b = log_mass(n)
    return enlarge(2 * spread(log_b) + math.sqrt(unmasked_column(n, log_b, own=True)))


def theorem_b_plus(n: float, slope: float = 0.0) -> float:
    """Bounds the gain with a causal mask, window or ALiBi (docs/theory, Theorem B+), rounded up."""
    log_b = log_mass(n, slope)
    return enlarge(2 * spread(log_b) + math.sqrt(causal_column(n, slope, log_b, own=True)))


def theorem_a_plus_plus(n: float) -> float:
    """Bounds the gain without a mask, own block apart (docs/theory, Theorem A++), rounded up."""
    log_b = log_mass(n)
    return enlarge(theorem_e(log_b) + math.sqrt(unmasked_column(n - 1, log_b, own=False)))


def theorem_b_plus_plus(n: float, slope: float = 0.0) -> float:
    """Bounds the gain of a causal head, own block apart (docs/theory, Theorem B++), rounded up."""
    log_b = log_mass(n, slope)
    return enlarge(theorem_e(log_b) + math.sqrt(causal_column(n - 1, slope, log_b, own=False)))
