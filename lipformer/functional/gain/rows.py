r"""What one row of L2 attention can do: the spread m, and the gains of Theorems D and E.

All three depend on the mask and the bias of the row only through its mass
:math:`B = \sum_{j \ne i} e^{b_{ij}}`, which is n - 1 for a row that sees n keys without bias.
They take :math:`\ln B`, so that a large bias cannot overflow.
"""

from __future__ import annotations

import math
import operator

from lipformer.functional.gain.lambertw import wright_omega
from lipformer.functional.rounding import enlarge


def check_tokens_count(n: float) -> float:
    """Returns n as an int or ``math.inf``; raises unless it is a number of tokens."""
    if isinstance(n, float) and n == math.inf:
        return n
    count = operator.index(n)  # type: ignore[arg-type]  # TypeError for what is no integer
    if not 1 <= count < 10**300:
        raise ValueError(
            f"n must be an integer >= 1 and below 1e300, or math.inf for any number of tokens, got {n!r}"
        )
    return count


def log_mass(n: float, slope: float = 0.0) -> float:
    r"""Computes :math:`\ln B` of the row with the most keys, without bias or with causal ALiBi.

    :math:`B = \sum_{\tau=1}^{n-1} e^{-\mathrm{slope}\,\tau}`, that is n - 1 for slope 0.

    Args:
        n: Number of keys of the row, its own included; ``math.inf`` needs slope > 0.
        slope: The ALiBi slope, >= 0.

    Returns:
        :math:`\ln B`, ``-math.inf`` for n = 1.
    """
    if n == 1:
        return -math.inf
    if slope == 0:
        return math.log(n - 1)
    # B = e^-s (1 - e^(-s(n-1))) / (1 - e^-s)
    return -slope + math.log(-math.expm1(-slope * (n - 1))) - math.log(-math.expm1(-slope))


def spread(log_b: float) -> float:
    r"""Computes the row quantity :math:`m = W_0(B/e)` of docs/theory, section 2.

    :math:`\sum_j P_{ij} \|z_i - z_j\|^2 \le m`, hence the covariance :math:`C_i` of the keys under
    row i has :math:`\|C_i\| \le \operatorname{tr} C_i \le m`. Equality: all other keys at one
    distance.

    Args:
        log_b: :math:`\ln B`.

    Returns:
        m, not yet rounded up.
    """
    return wright_omega(log_b - 1)


def row_spread(n: float, *, slope: float | None = None) -> float:
    r"""Computes :math:`m(n) = W_0((n-1)/e)`, rounded up.

    The largest value of :math:`\sum_j P_{ij} \|z_i - z_j\|^2` for a row that sees n keys, its own
    included (docs/theory, section 2). It grows like log n.

    Args:
        n: Number of keys, an integer >= 1, or ``math.inf``.
        slope: Causal ALiBi slope; n - 1 is then replaced by the mass of the other keys.

    Returns:
        An upper bound on m(n), at most 1e-12 relative above it.

    Example:
        >>> row_spread(1)
        0.0
        >>> round(row_spread(64), 3)
        2.307
    """
    return enlarge(spread(log_mass(check_tokens_count(n), slope or 0.0)))


def theorem_d(log_b: float) -> float:
    r"""Computes the gain in the token norm: :math:`1 + 4 W_0(B e^{-3/2})` (docs/theory, Theorem D).

    It bounds :math:`\max_i \sup_{|a|=1} \sum_j |J_{ij}^\top a|` for every mask and bias with rows
    of mass at most B, and is exact for n - 1 = B even: half of the other tokens at +r and half at
    -r on a line.

    Args:
        log_b: :math:`\ln B`.

    Returns:
        The gain, rounded up.
    """
    return enlarge(1 + 4 * wright_omega(log_b - 1.5))


def theorem_e(log_b: float) -> float:
    r"""Computes the own-token gain: :math:`1 + 2 W_0(B e^{-3/2})` (docs/theory, Theorem E).

    It bounds the diagonal blocks :math:`J_{ii} = P_{ii} I + 2 C_i` of the Jacobian for every mask
    and bias with rows of mass at most B, and is reached by the tokens that reach Theorem D.

    Args:
        log_b: :math:`\ln B`.

    Returns:
        The gain, rounded up.
    """
    return enlarge(1 + 2 * wright_omega(log_b - 1.5))
