r"""The gain in the l2 norm without search: Theorems A, B, C, the closed form, the published bound.

n is the number of keys that a row sees and of rows that see a key, at most: the sequence length, or
the window. Each function returns an upper bound of the Lipschitz constant of Z -> P(Z) Z in the
Frobenius norm, rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lipformer.functional.gain.lambertw import lambert_w0, wright_omega
from lipformer.functional.gain.rows import log_mass, spread
from lipformer.functional.gain.weighted import best_block_sum
from lipformer.functional.rounding import enlarge

# Terms of a sum over distances that are added one by one; the rest is bounded by an integral.
_EXPLICIT_TERMS = 64


def kim2021(n: float) -> float:
    r"""Computes the published gain :math:`\sqrt n (4 m + 1)`, m = W0((n-1)/e), for comparison.

    Kim, Papamakarios, Mnih, "The Lipschitz constant of self-attention", ICML 2021, their bound in
    the l2 norm for one head and without the projections (docs/theory, "Published bounds"). The
    paper inverts :math:`\phi(t) = t e^{t+1}` at n - 1, which is m.
    """
    return enlarge(math.sqrt(n) * (4 * spread(log_mass(n)) + 1))


def theorem_a(n: float) -> float:
    r"""Computes :math:`n^{1/4} + 2 m + 2 \sqrt m (n/2)^{1/4}`, no mask (docs/theory, Theorem A)."""
    m = spread(log_mass(n))
    return enlarge(n**0.25 + 2 * m + 2 * math.sqrt(m) * (n / 2) ** 0.25)


def theorem_b(n: float, slope: float = 0.0) -> float:
    r"""Computes :math:`(2n)^{1/4} + 2 m + 2 \sqrt m\, n^{1/4}`, causal (docs/theory, Theorem B).

    With ALiBi :math:`\sqrt n` becomes the sum over blocks of `best_block_sum`, which converges, and
    m the one of the row's mass.
    """
    m = spread(log_mass(n, slope))
    root = best_block_sum(n, slope)
    return enlarge(math.sqrt(math.sqrt(2) * root) + 2 * m + 2 * math.sqrt(m * root))


def closed_form(n: float, is_causal: bool) -> float:
    r"""Computes :math:`2 m + n^{1/4} (1 + 2 m^{2/3})^{3/4}`, causal: 2n - 1 for n.

    Theorems A+ and B+ with the constant weight :math:`\theta = 1 + x m` (docs/theory, end of A+),
    whose best x is explicit.
    """
    m = spread(log_mass(n))
    rows = 2 * n - 1 if is_causal else n
    return enlarge(2 * m + rows**0.25 * (1 + 2 * m ** (2 / 3)) ** 0.75)


def theorem_c(n: float, slope: float = 0.0) -> float:
    r"""Computes :math:`\sqrt S + 2 m + 2 \sqrt{m c}` for 0/1 masks or causal ALiBi (Theorem C).

    Without ALiBi it holds for every mask that keeps the diagonal and has at most n ones in a row
    or column: :math:`S = (n+1)/2`, :math:`c = W_0(1/e) (n-1)`. With ALiBi

    .. math::
        S = 1 + \sum_{\tau=1}^{n-1} \frac{1}{1 + e^{\mathrm{slope}\,\tau}}, \qquad
        c = \sum_{\tau=1}^{n-1} W_0(e^{-1 - \mathrm{slope}\,\tau}),

    or, where smaller, Theorem B's values: the block sum times :math:`\sqrt 2` for S and times 1
    for c. n may be ``math.inf`` then.
    """
    m = spread(log_mass(n, slope))
    if slope == 0:
        s, c = (n + 1) / 2, lambert_w0(1 / math.e) * (n - 1)
    else:
        root = best_block_sum(n, slope)
        s = min(1 + _sum_of_sigmoids(n, slope), math.sqrt(2) * root)
        c = min(_sum_of_lambert(n, slope), root)
    return enlarge(math.sqrt(s) + 2 * m + 2 * math.sqrt(m * c))


def _sum_of_sigmoids(n: float, slope: float) -> float:
    """Bounds the sum over tau of 1/(1 + e^(slope tau)), by ln(1 + e^-y)/slope as antiderivative."""
    return _sum_of_convex(
        n,
        lambda tau: 1 / (1 + math.exp(min(slope * tau, 700.0))),
        lambda tau: math.log1p(math.exp(-slope * tau)) / slope,
    )


def _sum_of_lambert(n: float, slope: float) -> float:
    """Bounds the sum over tau of w = W0(e^(-1 - slope tau)), by (w + w^2/2)/slope as above."""

    def tail(tau: float) -> float:
        w = wright_omega(-1 - slope * tau)
        return (w + w * w / 2) / slope

    return _sum_of_convex(n, lambda tau: wright_omega(-1 - slope * tau), tail)


def _sum_of_convex(n: float, f: Callable[[float], float], tail: Callable[[float], float]) -> float:
    """Bounds f(1) + ... + f(n-1) for a convex decreasing f with tail(t) its integral from t on.

    f(tau) is at most the integral over [tau - 1/2, tau + 1/2], by convexity.
    """
    explicit = min(_EXPLICIT_TERMS, n - 1)
    total = sum(f(tau) for tau in range(1, int(explicit) + 1))
    if explicit == n - 1:
        return total
    start = tail(explicit + 0.5)
    end = 0.0 if n == math.inf else tail(n - 0.5)
    return total + (start - end) + 1e-14 * start  # the difference loses digits for tiny slopes
