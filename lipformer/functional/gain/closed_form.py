r"""The gain in the l2 norm without search or table: the closed forms and the published bound.

n is the number of keys that a row sees and of rows that see a key, at most: the sequence length, or
the window. Each function returns an upper bound on the Lipschitz constant of Z -> P(Z) Z in the
Frobenius norm, rounded up.
"""

from __future__ import annotations

import math

from lipformer.functional.gain.lambertw import lambert_w0
from lipformer.functional.gain.rows import log_mass, spread
from lipformer.functional.rounding import enlarge


def kim2021(n: float) -> float:
    r"""Computes the published gain :math:`\sqrt n (4 m + 1)`, m = W0((n-1)/e), for comparison.

    Kim, Papamakarios, Mnih, "The Lipschitz constant of self-attention", ICML 2021, their bound in
    the l2 norm for one head and without the projections (docs/theory, "Published bounds"). The
    paper inverts :math:`\phi(t) = t e^{t+1}` at n - 1, which is m.
    """
    return enlarge(math.sqrt(n) * (4 * spread(log_mass(n)) + 1))


def closed_form(n: float, is_causal: bool, slope: float = 0.0) -> float:
    r"""Computes :math:`2 m + n^{1/4} (1 + 2 m^{2/3})^{3/4}`, causal: 2n - 1 for n.

    With ALiBi :math:`2 R^2` takes the place of 2n - 1 where it is smaller, for blocks of
    :math:`l \approx 1.26/\mathrm{slope}` rows :math:`R = \sqrt l / (1 - e^{-\mathrm{slope}\, l})`;
    n may be ``math.inf`` then (docs/theory, "The closed form").
    """
    m = spread(log_mass(n, slope))
    rows = 2 * n - 1 if is_causal else n
    if slope:
        length = max(1, round(1.2564 / slope))
        rows = min(rows, 2 * length / math.expm1(-slope * length) ** 2)
    return enlarge(2 * m + rows**0.25 * (1 + 2 * m ** (2 / 3)) ** 0.75)


def theorem_c(n: float) -> float:
    r"""Computes :math:`\sqrt{(n+1)/2} + 2 m + 2 \sqrt{m c}`, :math:`c = W_0(1/e) (n-1)` (Theorem C).

    It holds for every 0/1 mask that keeps the diagonal and has at most n ones in a row or column.
    """
    m = spread(log_mass(n))
    return enlarge(math.sqrt((n + 1) / 2) + 2 * m + 2 * math.sqrt(m * lambert_w0(1 / math.e) * (n - 1)))
