r"""What a row of given D can do, for Theorem G: :math:`U_D`, the row factor :math:`\Theta(D)` and A(D).

Everything is a bound over a cell of D (and, inside, over all cells of :math:`t = \|z_i - z_j\|^2`), in
interval arithmetic. The free numbers (:math:`\nu`, :math:`y_0`) are searched: each choice is valid, so
that only the tightness rests on it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lipformer.functional.gain.interval import Interval, down, up
from lipformer.functional.gain.rows import spread, theorem_e
from lipformer.functional.rounding import enlarge

# y_0 is the best of these multiples of the bound of q (docs/theory, Theorem G, step 2).
_FACTORS = (0.55, 0.6, 0.68, 0.8, 1.0, 1.3, 1.8)
# Sampled keys for the choice of the free numbers.
_SAMPLES = 100
# Rounds of the search for nu.
_CUTS = 6


@dataclass
class Cells:
    r"""Cells that cover u = D - 1 in [0, B] (a column) and t in [0, `last`] (a row).

    Args:
        mass: B > 0, an upper bound.
        rows: Number of cells of u, about; they are finest where the maxima lie, for u in [0.3, 12].
        keys: Number of cells of t, about.
        sampled: Points in place of cells.
    """

    mass: float
    rows: int = 400
    keys: int = 2400
    sampled: bool = False
    u: Interval = field(init=False)
    t: Interval = field(init=False)
    last: float = field(init=False)

    def __post_init__(self) -> None:
        knots = _row_knots(self.mass, self.rows)[:, None]
        self.u = Interval(knots[1:], knots[1:]) if self.sampled else Interval(knots[:-1], knots[1:])
        top = math.log1p(self.mass) + 2
        near = top * torch.linspace(0, 1, self.keys, dtype=torch.float64) ** 1.5  # psi goes like sqrt(t)
        t = torch.cat([near, top + torch.linspace(0.5, 28, 30, dtype=torch.float64)])[None, :]
        self.t = Interval(t, t) if self.sampled else Interval(t[:, :-1], t[:, 1:])
        self.last = t[0, -1].item()

    @property
    def d(self) -> Interval:
        """D = 1 + u."""
        return 1 + self.u

    @property
    def p(self) -> Interval:
        """1 - 1/D, without cancellation for a small u."""
        return 1 / (1 + 1 / self.u)

    def u_log(self) -> Interval:
        """u ln(B/u), which is largest (B/e) at u = B/e; only the upper end is meant."""
        rising = self.u.high * math.e < self.mass * (1 - 1e-9)
        end = self.u.top() * (self.mass / self.u.top()).log()
        return Interval.of(torch.where(rising, end.high, enlarge(self.mass / math.e)))

    def spread(self) -> Interval:
        """h(D) = (1 - 1/D) ln(B/u) from above, see "The row quantity m"."""
        log = (self.mass / self.u).log().maximum(0.0)
        h = (self.u_log() / self.d).minimum(self.p.top() * log.top())
        return Interval.of(h.high.clamp_max(enlarge(spread(math.log(self.mass)))))

    def own(self) -> Interval:
        """A(D) = 1/D + 2 h(D), a bound of the own block, from above (Theorem E)."""
        a = 1 / self.d + 2 * self.spread()
        return Interval.of(a.high.clamp_max(theorem_e(math.log(self.mass))))


def _row_knots(mass: float, count: int) -> Tensor:
    """0 and a piecewise geometric sequence up to B."""
    first = min(0.02, mass / 20)
    ends = [first, *(v for v in (0.3, 12.0) if first < v < mass), mass]
    parts = [torch.zeros(1, dtype=torch.float64)]
    for low, high in itertools.pairwise(ends):
        share = 0.7 if (low, high) == (0.3, min(12.0, mass)) or len(ends) == 2 else 0.15
        steps = torch.linspace(0, 1, int(count * share) + 2, dtype=torch.float64)
        parts.append(low * (high / low) ** steps[:-1])
    return torch.cat([*parts, torch.tensor([mass], dtype=torch.float64)])


def row_supremum(cells: Cells, x: Tensor, tail: Tensor) -> Tensor:
    r"""Bounds :math:`\sum_{j \ne i} P_{ij} X(t_j)` over the rows of each cell of D.

    .. math:: U_D[X] = \tfrac1D \min_{\nu \ge 0} (\nu u + B \sup_{t \ge 0} e^{-t} (X(t) - \nu)_+).

    Args:
        cells: The cells.
        x: X from above on each cell, (rows, keys).
        tail: Above :math:`e^{-t} X(t)` beyond the last t, (rows, 1) or ().

    Returns:
        (rows, 1), rounded up.
    """
    nu = _best_nu(cells, x)
    decay = (-cells.t).exp().high
    largest = torch.maximum(up(decay * up(x - nu).clamp_min(0)).amax(1, keepdim=True), tail)
    rest = up(cells.mass * largest)
    # (nu u + rest)/(1 + u) is monotone in u, so largest at an end of the cell
    ends = [up(up(up(nu * u) + rest) / down(1 + u)) for u in (cells.u.low, cells.u.high)]
    return torch.maximum(*ends)


def _best_nu(cells: Cells, x: Tensor) -> Tensor:
    """Minimises nu u + B max_t e^-t (X - nu)_+, convex and piecewise linear in nu; any nu is valid."""
    u, decay = cells.u.high, (-cells.t.low).exp()

    def value(nu: Tensor) -> tuple[Tensor, Tensor]:
        largest, place = (decay * (x - nu).clamp_min(0)).max(1, keepdim=True)
        return nu * u + cells.mass * largest, u - cells.mass * decay[0, place] * (largest > 0)

    low, high = torch.zeros_like(u), x.amax(1, keepdim=True)
    (f_low, s_low), (f_high, s_high) = value(low), (high * u, u)
    best, f_best = torch.where(f_low < f_high, low, high), torch.minimum(f_low, f_high)
    for _ in range(_CUTS):
        # Where the two supporting lines meet.
        meet = (f_low - s_low * low - f_high + s_high * high) / (s_high - s_low).clamp_min(1e-300)
        nu = torch.minimum(torch.maximum(meet, low), high)
        f, s = value(nu)
        best, f_best = torch.where(f < f_best, nu, best), torch.minimum(f, f_best)
        left = s < 0
        pairs = ((nu, low, high), (f, f_low, f_high), (s, s_low, s_high))
        low, f_low, s_low = (torch.where(left, new, old) for new, old, _ in pairs)
        high, f_high, s_high = (torch.where(left, old, new) for new, _, old in pairs)
    return best


@dataclass
class Weights:
    r"""The matrices :math:`H_j` of Theorem G, step 1, on the cells.

    Attributes:
        first: :math:`1/\gamma`.
        omega: :math:`\omega`.
        quad: :math:`4 t \omega`.
        most_quad: A bound of :math:`\sum P\, 4 t \omega` known beforehand.
        most_theta: A bound of :math:`\Theta` known beforehand.
        slack: Above :math:`4 t \omega` for every t.
    """

    first: Interval
    omega: Interval
    quad: Interval
    most_quad: Tensor
    most_theta: Tensor
    slack: float


def weighted(cells: Cells, x: float, eps: Tensor) -> Weights:
    r""":math:`H = \gamma I + \frac4x \delta\delta^\top` with :math:`\gamma = 1 + \epsilon D e^t`.

    Args:
        cells: The cells.
        x: The free parameter x > 0.
        eps: The Frobenius weight of each row, (rows, 1), >= 0.
    """
    gamma = 1 + Interval.of(eps) * cells.d * cells.t.exp()
    kt = cells.t * (4 / Interval.of(x))
    return Weights(
        first=1 / gamma,
        omega=1 / (gamma + kt),
        quad=x * (1 / (1 + gamma / kt)),
        most_quad=(x * cells.p).high,
        most_theta=(cells.p + x * cells.spread()).high,
        slack=x,
    )


def frobenius(cells: Cells) -> Weights:
    r""":math:`H = D e^t I`, the corollary of Theorem G: no column sum is left."""
    omega = (-cells.t).exp() / cells.d
    nothing = torch.full_like(cells.u.high, math.inf)
    return Weights(omega, omega, 4 * cells.t * omega, nothing, nothing, slack=2.0)


def row_factor(cells: Cells, w: Weights, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Bounds :math:`\sum_{j \ne i} P_{ij} v_j^\top H_j^{-1} v_j`: docs/theory, Theorem G, steps 1 to 3.

    .. math::
        \Theta &= U_D[\Xi + \tfrac{U_D[\psi]}{2 y_0 - q} \psi], \quad q = U_D[4 t \omega] < 2 y_0, \\
        \Xi &= \max\{\tfrac1\gamma, (2t-1)^2 \omega\}, \quad \psi = \sqrt t\, |y_0 + (2 - 4t)\, \omega|.

    Args:
        cells: The cells.
        w: `weighted` or `frobenius` on them.
        factor: The free y_0 as a multiple of q, (rows, 1); None tries several.

    Returns:
        The factor :math:`\Theta` (rows, 1), rounded up, and the multiples used.
    """
    t, decay = cells.t, math.exp(-cells.last) * (1 + 1e-9)
    xi = w.first.maximum((2 * t - 1).square() * w.omega).high
    turned = (2 - 4 * t) * w.omega
    tail = torch.tensor(decay * w.slack, dtype=torch.float64)
    q = torch.minimum(row_supremum(cells, w.quad.high, tail), w.most_quad)

    def theta(factor: Tensor) -> Tensor:
        y = (factor * q).clamp_min(1e-9)
        gap = -up(q - 2 * y)  # 2 y_0 - q from below
        psi = (t.sqrt() * (Interval.of(y) + turned).abs()).high
        # Beyond the last t >= 30: psi <= sqrt(t) (y_0 + 2 + slack), Xi <= 1 + 4 t^2, and e^-t wins.
        tail_psi = decay * math.sqrt(cells.last) * (y + 2 + w.slack) * (1 + 1e-9)
        ratio = up(row_supremum(cells, psi, tail_psi) / gap.clamp_min(1e-300)).clamp_max(1e100)
        tail = (decay * (1 + 4 * cells.last**2) + ratio * tail_psi) * (1 + 1e-9)
        bound = row_supremum(cells, up(xi + up(ratio * psi)), tail)
        return torch.minimum(bound.masked_fill(gap <= 0, math.inf), w.most_theta)

    if factor is not None:
        return theta(factor), factor
    tried = [torch.full_like(q, multiple) for multiple in _FACTORS]
    values, which = torch.stack([theta(factor) for factor in tried]).min(0)
    return values, torch.stack(tried).gather(0, which[None])[0]


def samples_of(cells: Cells) -> Cells:
    """The same rows as points, with few keys, to choose free numbers on."""
    return Cells(cells.mass, cells.rows, _SAMPLES, sampled=True)
