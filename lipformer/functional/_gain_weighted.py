r"""The gain in the l2 norm with row weights: Theorems A+, B+ and, sharper for most n, A++ and B++.

A+ and B+ are proved in docs/theory. A++ and B++ treat a token's own block apart:

**Theorems A++ and B++.** Let J be the Jacobian of Z -> P(Z) Z. For every x > 0

.. math:: G_2 \le G_{self} + \sqrt Q, \qquad
    Q = \max_j \sum_{i \ne j} \theta_i P_{ij} (1 + \tfrac4x s_{ij}^2), \qquad
    \theta = 1 - \tfrac1D + x h(D),

with :math:`G_{self}` of Theorem E and Q bounded by `unmasked_column` and `causal_column`.

Proof. The diagonal blocks of J are a block diagonal matrix of norm at most :math:`G_{self}`. The
others are :math:`J_{ij} = P_{ij} (I + 2 (z_j - g_i)(z_i - z_j)^\top)`. For a unit vector a, by
Cauchy-Schwarz of :math:`(a, \sqrt x\, a \cdot (z_j - g_i))` with
:math:`(dz_j, \tfrac{2}{\sqrt x} (z_i - z_j) \cdot dz_j)` over the :math:`j \ne i`,

.. math:: \Big(a \cdot \sum_{j \ne i} J_{ij} dz_j\Big)^2 \le \theta_i \sum_{j \ne i} P_{ij}
    \left(|dz_j|^2 + \tfrac4x ((z_i - z_j) \cdot dz_j)^2\right),

because :math:`\sum_{j \ne i} P_{ij} (1 + x (a \cdot (z_j - g_i))^2)` is at most
:math:`1 - P_{ii} + x\, a^\top C_i a`, with :math:`P_{ii} = 1/D_i` and
:math:`\|C_i\| \le h(D_i)`. Sum over i and collect :math:`|dz_j|^2`. What
this gains over A+ and B+: the weight vanishes as D tends to 1, where a token sees only itself, and
one row less is counted.
"""

from __future__ import annotations

import math

from lipformer.functional._gain_column import causal_column, unmasked_column
from lipformer.functional._gain_row import log_mass, round_up, spread, theorem_e


def theorem_a_plus(n: float) -> float:
    r"""Bounds the gain without a mask (docs/theory, Theorem A+).

    .. math:: 2m + \sqrt{\min\{ \sqrt{(1+8/x^2)\, n\, G_1},\;
        \beta/2 + \sqrt{(1+8/x^2) (n\, G_2 + \beta^2/4)} \}}

    with :math:`\theta = 1 + x h(D)`, :math:`r = \max \theta/D`, :math:`G_1 = \max \theta^2/D`,
    :math:`G_2 = \max \theta^2 (D-1)/D^2`, :math:`\beta = 3.25\, r`.

    Args:
        n: Number of tokens.

    Returns:
        The gain, rounded up.
    """
    log_b = log_mass(n)
    return round_up(2 * spread(log_b) + math.sqrt(unmasked_column(n, log_b, own=True)))


def theorem_b_plus(n: float, slope: float = 0.0) -> float:
    r"""Bounds the gain with a causal mask, a window of n or ALiBi (docs/theory, Theorem B+).

    .. math:: 2m + \sqrt{\sqrt{(1+8/x^2)\, n\, \max_D [2 r \theta (1-1/D) + (\theta/D)^2]}}

    With ALiBi :math:`\sqrt n` becomes a sum over blocks, see `causal_column`.

    Args:
        n: Number of tokens or length of the window; ``math.inf`` needs slope > 0.
        slope: The ALiBi slope, 0 for none.

    Returns:
        The gain, rounded up.
    """
    log_b = log_mass(n, slope)
    return round_up(2 * spread(log_b) + math.sqrt(causal_column(n, slope, log_b, own=True)))


def theorem_a_plus_plus(n: float) -> float:
    """Bounds the gain without a mask, own block apart (Theorem A++, proved above).

    Args:
        n: Number of tokens.

    Returns:
        The gain, rounded up.
    """
    log_b = log_mass(n)
    return round_up(theorem_e(log_b) + math.sqrt(unmasked_column(n - 1, log_b, own=False)))


def theorem_b_plus_plus(n: float, slope: float = 0.0) -> float:
    """Bounds the gain with a causal mask, window or ALiBi, own block apart (Theorem B++, above).

    Args:
        n: Number of tokens or length of the window; ``math.inf`` needs slope > 0.
        slope: The ALiBi slope, 0 for none.

    Returns:
        The gain, rounded up.
    """
    log_b = log_mass(n, slope)
    return round_up(theorem_e(log_b) + math.sqrt(causal_column(n - 1, slope, log_b, own=False)))
