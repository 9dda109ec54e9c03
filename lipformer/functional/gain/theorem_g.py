r"""Theorem G (docs/theory): the gain in the l2 norm with weights of a row that know its D.

.. math:: G_2^2 \le \max_D [\lambda(D) + Q(D)] + B_c \max_D \epsilon \mu, \qquad
    \mu = \frac{\Theta}{1 - A^2/\lambda}

for any :math:`\lambda(D) > A(D)^2`, :math:`\epsilon(D) \ge 0` and x > 0. `theorem_g` evaluates it in
interval arithmetic for given x and E (:math:`\epsilon \approx E/\mu`), `corollary` its form for any mask
or bias. Both take about a second: `table` holds what recipes/gains has found with them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lipformer.functional.gain.interval import Interval, up
from lipformer.functional.gain.row_factor import (
    Cells,
    frobenius,
    row_factor,
    samples_of,
    weighted,
)
from lipformer.functional.rounding import enlarge

# Above max_t e^-t sum_{n <= k} (2t)^n/n! - 1, which is 2.2487 for k = 3 and 9.4886 for k = 5.
_ETA_3, _ETA_5 = 2.25, 9.55
# Cells of rho; beyond the last one all bounds fall (docs/theory, "How Theorem G is computed").
_RHO = torch.cat(
    [torch.linspace(0, 3, 601, dtype=torch.float64), torch.linspace(3.05, 14, 220, dtype=torch.float64)]
)
# Blocks of ALiBi that are added one by one.
_BLOCKS = 60
# Rounds of the search for eps and steps of the one for lambda.
_ROUNDS, _STEPS = 2, 12


class Mask(NamedTuple):
    """What a column can see: `kind` is "none" or "causal"; `rows` see a key beside its own one.

    With a slope (causal ALiBi at any length) `rows` is not used.
    """

    kind: str
    rows: float
    slope: float = 0.0

    @property
    def mass(self) -> float:
        """B = B_c, rounded up."""
        return enlarge(1 / math.expm1(self.slope)) if self.slope else self.rows


def column(cells: Cells, mu: Tensor, x: float, mask: Mask) -> tuple[Interval, Interval]:
    r"""Bounds :math:`\max_j \sum_{i \ne j} \mu_i P_{ij} (1 + \kappa s_i^2)` (docs/theory, G, step 4).

    Args:
        cells: The cells of D.
        mu: :math:`\mu` from above on each, (rows, 1).
        x: :math:`\kappa = 4/x`.
        mask: Which rows see a key.

    Returns:
        The bound, and :math:`r = \max \mu/D`; the upper ends count.
    """
    kappa, weights = 4 / Interval.of(x), Interval.of(mu)
    r = (weights / cells.d).amax().top()
    if mask.kind == "causal":
        growth = (2 * r * weights * cells.p + (weights / cells.d).square()).amax().top()
        if not mask.slope:
            return _over_rho(_causal(mask.rows * growth, r), kappa), r
        return _blocks(growth, r, kappa, mask.slope), r
    g1 = mask.rows * (weights.square() / cells.d).amax().top()
    peak = (cells.u.low <= 1) & (cells.u.high >= 1)  # (D - 1)/D^2 is largest, 1/4, at D = 2
    ends = [(u / (1 + u).square()).high for u in (Interval.of(cells.u.low), cells.u.top())]
    share = torch.maximum(*ends).masked_fill(peak, 0.25)
    g2 = mask.rows * (weights.square() * Interval.of(share)).amax().top()
    beta = _ETA_3 * r
    rho = Interval.of(_RHO)
    taylor = 1 + 2 * rho.square() + (2 / Interval.of(3.0)) * rho.square().square()
    eta = _ETA_5 * r
    bounds = [
        _over_rho((g1 / (2 * rho).cosh()).sqrt(), kappa),
        beta / 2 + ((1 + kappa.square() / 2) * (g2 + beta.square() / 4)).sqrt(),
        _over_rho((eta + (eta.square() + 4 * g2 * taylor).sqrt()) / (2 * taylor), kappa),
    ]
    return bounds[0].minimum(bounds[1]).minimum(bounds[2]), r


def _causal(growth: Interval, r: Interval) -> Interval:
    """S(rho) with S^2 cosh(2 rho) + 2 r S = growth."""
    cosh = (2 * Interval.of(_RHO)).cosh()
    return ((r.square() + growth * cosh).sqrt() - r) / cosh


def _over_rho(s: Interval, kappa: Interval) -> Interval:
    """Bounds S(rho) (1 + kappa rho) over rho >= 0 for a falling S, given at the knots, (*, knots)."""
    product = Interval.of(s.high[..., :-1]) * (1 + kappa * Interval.of(_RHO[1:]))
    return Interval.of(product.high.amax(-1))


def _blocks(growth: Interval, r: Interval, kappa: Interval, slope: float) -> Interval:
    """The causal bound as a sum over blocks of rows (docs/theory, "ALiBi")."""
    best = torch.tensor(math.inf, dtype=torch.float64)
    for share in (0.8, 1.2, 1.7):
        size = max(1, round(share / slope))
        start = torch.arange(_BLOCKS + 1, dtype=torch.float64)[:, None] * size + 1
        f = (-slope * Interval.of(start)).exp()  # (blocks + 1, 1)
        each = Interval.of(f.high[:, 0]) * _over_rho(_causal(size * growth, f * r), kappa)
        total = each.high[:-1].sum() * (1 + 1e-13)
        last = up(f.high[-1, 0] * _over_rho(_causal(size * growth, 0 * r), kappa).high)
        rest = Interval.of(last) / (1 - (-slope * Interval.of(float(size))).exp())
        best = torch.minimum(best, up(total + rest.high))
    return Interval.of(best)


def theorem_g(mask: Mask, x: float, e: float, cells: Cells | None = None) -> float:
    """Evaluates Theorem G for given x and E.

    Args:
        mask: Which rows see a key.
        x: The free x > 0.
        e: E >= 0, for the Frobenius weight eps = E/mu.
        cells: The cells; sampled ones give an estimate and no bound.

    Returns:
        The gain, rounded up.
    """
    cells = cells or Cells(mask.mass)
    samples = cells if cells.sampled else samples_of(cells)
    eps = torch.full_like(cells.u.high, e / max(1.0, 0.5 * x * cells.spread().high.amax().item() + 0.7))
    theta, choice = row_factor(samples, weighted(samples, x, eps))
    lam = _best_lambda(samples, theta, eps, x, mask)
    for _ in range(_ROUNDS):  # towards the fixed point eps = E/mu; any eps and lambda are valid
        mu = theta / (1 - samples.own().high.square() / lam)
        eps = e / mu.clamp_min(1e-3)
        theta, choice = row_factor(samples, weighted(samples, x, eps))
        lam = _best_lambda(samples, theta, eps, x, mask, lam)
    if not cells.sampled:
        theta, _ = row_factor(cells, weighted(cells, x, eps), choice)
        lam = _best_lambda(cells, theta, eps, x, mask, lam)
    return _value(cells, theta, eps, lam, x, mask)[0]


def _value(
    cells: Cells, theta: Tensor, eps: Tensor, lam: Tensor, x: float, mask: Mask
) -> tuple[float, Tensor, float]:
    """The bound for given Theta, eps and lambda, (rows, 1) each, with Q(D) and B_c max eps mu."""
    share = 1 - cells.own().square() / Interval.of(lam)
    mu = (Interval.of(theta) / Interval.of(share.low.clamp_min(0.0))).high  # infinite if lambda <= A^2
    q, r = column(cells, mu, x, mask)
    each = q.high.expand_as(mu)
    if mask.kind == "none":  # a strong hub j has a large D_j itself
        each = torch.minimum(each, (r * (cells.u + 4 / Interval.of(x) * cells.u_log())).high)
    rest = mask.mass * (Interval.of(eps) * Interval.of(mu)).amax()
    total = (Interval.of(lam) + Interval.of(each)).amax() + rest
    return total.sqrt().high.item(), each, rest.high.item()


def _best_lambda(
    cells: Cells, theta: Tensor, eps: Tensor, x: float, mask: Mask, lam: Tensor | None = None
) -> Tensor:
    """Searches lambda(D) with lambda + Q constant, by damped steps from a constant or a given one."""
    own = cells.own().high
    if lam is None:
        q, _ = column(cells, theta, x, mask)
        top = own.amax()
        lam = (top * (top + q.high.sqrt())).expand_as(own)
    least, best, kept = 1.02 * own.square() + 1e-9, math.inf, lam
    for _ in range(_STEPS):
        gain, each, rest = _value(cells, theta, eps, lam, x, mask)
        if gain < best:
            best, kept = gain, lam
        lam = torch.maximum(0.5 * lam + 0.5 * (0.995 * best**2 - rest - each), least)
    return kept


def frobenius_factor(cells: Cells) -> Tensor:
    r"""The row factor :math:`\Theta_F(D)` of the corollary on the cells, (rows, 1)."""
    samples = samples_of(cells)
    _, choice = row_factor(samples, frobenius(samples))
    return row_factor(cells, frobenius(cells), choice)[0]


def corollary(cells: Cells, theta: Tensor, lam: Tensor) -> Tensor:
    r"""Bounds :math:`T = \max_D \Theta_F/(1 - A^2/\lambda)`.

    :math:`G_2^2 \le \lambda + B_c T` for any mask or bias (docs/theory, Corollary of Theorem G).

    Args:
        cells: The cells of a mass B.
        theta: `frobenius_factor` on them, (rows, 1).
        lam: Numbers above :math:`G_{self}^2`, (k,).

    Returns:
        T for each, (k,), rounded up.
    """
    share = (1 - cells.own().square() / Interval.of(lam)).low.clamp_min(0.0)
    return (Interval.of(theta) / Interval.of(share)).high.amax(0)
