r"""Theorem F (docs/theory): the gain of a head whose tokens lie in a ball, :math:`\|z_i\| \le r`.

.. math:: G_2^2 \le \Theta\, (S + \omega), \qquad
    \Theta = 1 + \max_{\lambda \le \Lambda} \lambda \Big[\frac{4\tau - 4 - y}{1 + y \tau}
    + \frac{4\Lambda}{\omega}\Big]_+, \qquad \tau = 2 r^2 (1 + \sqrt{1 - \lambda/r^2})

for any :math:`y \ge 0` and :math:`\omega > 0`, with :math:`\Lambda = \min(r^2, m)` and S above every
column sum :math:`\sum_i P_{ij} (1 + y s_{ij}^2)`, which depends on the mask. y and :math:`\omega` are
searched; the bound for given ones is evaluated in interval arithmetic. No bound here needs a key to be
present, so that all hold with padding.

Radii r and the free numbers are float64 tensors (*, 1), what is summed or maximised is the last axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lipformer.functional.gain.dense_bias import dense_log_mass
from lipformer.functional.gain.interval import Interval
from lipformer.functional.gain.lambertw import wright_omega, wright_omega_tensor
from lipformer.functional.gain.rows import log_mass, spread
from lipformer.functional.rounding import enlarge

Column = Callable[[Tensor, Tensor], Tensor]
"""(r, y) -> S, rounded up, all (*, 1)."""

LARGEST = 12.0
"""Radii above it get no bound: that for any number of keys grows like e^(r^2/2)."""

# Cells of lambda in the search and in the final evaluation.
_COARSE, _FINE = 24, 400
# The search: points of the grid in each direction, rounds, and how it shrinks.
_GRID, _ROUNDS, _SHRINK = 5, 8, 0.6
# Lags that are added one by one, and the growth of the blocks after them.
_SINGLE, _GROWTH = 64, 1.01


def _cells(r: Tensor, most: float, count: int) -> tuple[Interval, Interval, Interval]:
    r"""Cells of :math:`s = \sqrt{1 - \lambda/r^2}` that cover :math:`0 \le \lambda \le \Lambda`.

    Returns:
        :math:`\lambda` on each cell, the largest :math:`\tau = 2 r^2 (1 + s)` there, and
        :math:`\Lambda = \min(r^2, m)`.
    """
    square = Interval.of(r).square()
    cap = square.high.clamp_max(most)
    first = ((1 - cap / square.low).clamp_min(0.0).sqrt() - 1e-9).clamp_min(0.0)
    knots = first + (1 - first) * torch.linspace(0, 1, count + 1, dtype=torch.float64)
    knots[..., -1] = 1.0
    s = Interval(knots[..., :-1], knots[..., 1:])
    lam = (square * (1 - s.square())).minimum(Interval.of(cap)).maximum(0.0)
    return lam, (2 * square * (1 + s)).top(), Interval.of(cap)


def row_factor(r: Tensor, y: Tensor, omega: Tensor, most: float, cells: int) -> Tensor:
    r"""Bounds :math:`\Theta` over all rows of spread at most ``most`` (docs/theory, F, steps 1 and 2).

    The fraction grows with :math:`\tau`.
    """
    lam, tau, cap = _cells(r, most, cells)
    free = Interval.of(y)
    inner = (4 * tau - 4 - free) / (1 + free * tau) + 4 * cap / Interval.of(omega)
    return (1 + (lam * inner.top()).maximum(0.0)).high.amax(-1, keepdim=True)


def full_column(r: Tensor, y: Tensor) -> Tensor:
    r"""Bounds S without a mask: :math:`e^{r^2} (\sqrt{1 + y^2/2} + \kappa)/2`, for any number of keys.

    :math:`\kappa = \max_{s \le r^2} e^{-s} (1 + y s)` (docs/theory, Theorem F, step 3).
    """
    square, free = Interval.of(r).square(), Interval.of(y)
    top = free * (1 / free - 1).exp()  # over all s
    end = (-square.top()).exp() * (1 + free * square.top())
    rising = square.high <= (1 - 1 / free).low
    kappa = torch.where(y <= 1, 1.0, torch.where(rising, end.high, top.high))
    size = (1 + free.square() / 2).sqrt()
    return (square.exp() * (size + Interval.of(kappa)) / 2).high


def entry(c: Tensor, t_max: Tensor, y: Tensor) -> Tensor:
    r"""Bounds :math:`\max_{0 \le t \le T} (1 + y t)/(1 + c e^t)`, elementwise, for a lower bound c > 0.

    :math:`1 + c e^t` lies above its tangent at any :math:`t_0`, and a fraction of linear functions is
    largest at an end: :math:`\max_{t \in \{0, T\}} (1 + y t)/(1 + c e^{t_0} (1 + t - t_0))`. With
    :math:`t_0` at the maximum this is the maximum itself.
    """
    with_y = y.clamp_min(1e-12)
    best = wright_omega_tensor(1 / with_y - 1 - c.clamp_min(1e-300).log()) + 1 - 1 / with_y
    place = Interval.of(torch.minimum(best.clamp_min(0.0), t_max))
    free, height = Interval.of(y), Interval.of(c) * place.exp()
    ends = []
    for end in (0.0, t_max):
        line = 1 + height * (Interval.of(end) - place + 1)
        ends.append(((1 + free * Interval.of(end)) / line.maximum(0.0)).high)
    return torch.maximum(*ends)


def _lags(keys: float, slope: float) -> tuple[Tensor, Tensor, float]:
    """Lags 1 to keys - 1 in blocks: first lags, numbers of lags, and the lag after the last block."""
    last = min(keys, math.ceil(45 / slope) + _SINGLE) if slope else keys
    starts = [float(k) for k in range(1, int(min(last, _SINGLE)))]
    lag = float(_SINGLE)
    while lag < last:
        starts.append(lag)
        lag = math.ceil(lag * _GROWTH)
    bounds = torch.tensor([*starts, last], dtype=torch.float64)
    return bounds[:-1], bounds[1:] - bounds[:-1], last


def causal_column(keys: float, slope: float) -> Column:
    r"""Bounds S for a causal mask with at most ``keys`` keys in a row, with ALiBi or without.

    The k-th row after key j sees j and the k - 1 tokens between, whatever is padded: in it
    :math:`P_{ij} \le 1/(1 + c e^t)`, :math:`c = e^{\sigma k} + e^{-4 r^2} \sum_{l=1}^{k-1} e^{\sigma l}`
    (docs/theory, Theorem F).
    """
    first, counts, last = _lags(keys, slope)

    def column(r: Tensor, y: Tensor) -> Tensor:
        t_max = (4 * Interval.of(r).square()).high
        far = (-Interval.of(t_max)).exp().low
        if slope:
            grown, step = (slope * Interval.of(first)).exp(), (Interval.of(slope)).exp()
            between = (grown - step).maximum(0.0) / (step - 1)
            c = (grown + Interval.of(far) * between).low
        else:
            c = (1 + Interval.of(far) * (Interval.of(first) - 1)).low
        # q falls with the lag: a block has at most its first one for each
        total = enlarge((entry(c, t_max, y) * counts).sum(-1, keepdim=True), len(first))
        if last < keys:
            rest = (-slope * Interval.of(last)).exp() / (1 - (-Interval.of(slope)).exp())
            total = total + (rest * (1 + Interval.of(y) * Interval.of(t_max))).high
        return enlarge(1 + total)

    return column


def any_column(keys: float) -> Column:
    """Bounds S for any 0/1 mask (and biases <= 0) with at most ``keys`` ones in a column."""

    def column(r: Tensor, y: Tensor) -> Tensor:
        t_max = (4 * Interval.of(r).square()).high
        return enlarge(1 + (keys - 1) * entry(torch.ones_like(t_max), t_max, y))

    return column


def bias_column(b: Tensor) -> Column:
    r"""Bounds S for a bias (N, N), own entries -inf: :math:`1 + \max_j \sum_{i \ne j} q(b_{ij})`.

    q grows with b, which is rounded up to a multiple of 1/256. No key but i and j is counted on, so that
    any others may be padded.
    """
    levels, place = ((256 * b).ceil() / 256).cpu().unique(return_inverse=True)
    c = (-Interval.of(levels)).exp().low

    def column(r: Tensor, y: Tensor) -> Tensor:
        entries = entry(c, (4 * Interval.of(r).square()).high, y).masked_fill(levels == -math.inf, 0.0)
        sums = torch.stack([row[place].sum(0).max() for row in entries])
        return enlarge(1 + sums[:, None], 5000 + len(b))

    return column


def theorem_f(r: Tensor, free: tuple[Tensor, Tensor], column: Column, most: float, cells: int) -> Tensor:
    r"""Evaluates :math:`\sqrt{\Theta (S + \omega)}` for given y and :math:`\omega`, rounded up."""
    y, omega = free
    theta = Interval.of(row_factor(r, y, omega, most, cells))
    gain: Tensor = (theta * (Interval.of(column(r, y)) + Interval.of(omega))).sqrt().high
    return gain


def search(r: Tensor, column: Column, most: float) -> tuple[Tensor, Tensor]:
    r"""Searches y and :math:`\omega` for each of the radii (K, 1) on shrinking grids; any are valid."""
    at = torch.tensor([[math.log(0.4), math.log(2.0)]], dtype=torch.float64).repeat(len(r), 1)
    offsets = torch.linspace(-2.2, 2.2, _GRID, dtype=torch.float64)
    r_y, r_both = r.repeat_interleave(_GRID, 0), r.repeat_interleave(_GRID**2, 0)

    for _ in range(_ROUNDS):
        y = ((at[:, :1] + offsets).exp() - 0.05).clamp_min(0.0).reshape(-1, 1)
        s = column(r_y, y).repeat_interleave(_GRID, 0)
        omega = (r.square() * (at[:, 1:] + offsets).exp()).repeat_interleave(_GRID, 0).reshape(-1, 1)
        free = y.repeat_interleave(_GRID, 0), omega
        gain = theorem_f(r_both, free, lambda r, y, s=s: s, most, _COARSE)  # type: ignore[misc]
        best = gain.reshape(len(r), -1).argmin(1)
        at = at + torch.stack([offsets[best // _GRID], offsets[best % _GRID]], 1)
        offsets = offsets * _SHRINK
    return (at[:, :1].exp() - 0.05).clamp_min(0.0), r.square() * at[:, 1:].exp()


def token_gains(r: Tensor, most: float) -> Tensor:
    r"""Bounds the gain in the token norm, any mask or bias (docs/theory, Theorem F).

    .. math:: \max_{\lambda \le \Lambda} \sqrt{1 + 4 \lambda (\tau - 1)} + 2 \sqrt{\Lambda \lambda}
    """
    lam, tau, cap = _cells(r, most, _FINE)
    root = (1 + 4 * lam * (tau - 1).top()).maximum(0.0).sqrt()
    gain: Tensor = (root + 2 * (cap * lam).sqrt()).high.amax(-1, keepdim=True)
    return gain


def self_gains(r: Tensor, log_b: float) -> Tensor:
    r"""Bounds the own-token gain, any mask or bias: :math:`\max_D \frac1D + 2 \min(r^2, h(D))`.

    :math:`\frac1D + 2 h(D)` grows up to :math:`u = W_0(B e^{-3/2})` (Theorem E). So for every smaller u
    the larger of its value there and :math:`\frac{1}{1+u} + 2 r^2` is a bound; best is u with h = r^2.
    """
    square = r.square()
    if log_b == math.inf:
        return enlarge(1 + 2 * square)
    low, high = torch.zeros_like(r), torch.full_like(r, wright_omega(log_b - 1.5))

    def h(u: Tensor) -> Tensor:
        return u / (1 + u) * (log_b - u.clamp_min(1e-300).log())

    for _ in range(60):
        middle = (low + high) / 2
        small = h(middle) <= square
        low, high = torch.where(small, middle, low), torch.where(small, high, middle)
    return enlarge(1 / (1 + low) + 2 * torch.maximum(square, h(low)))


class Rows(NamedTuple):
    """What a head's rows see, in which norm.

    Attributes:
        norm: "l2", "token" or "self".
        keys: the largest number of keys in a row, and of rows that see a key; may be ``math.inf``.
        mask: "none", "causal" (also with a window) or "any" (0/1 masks, biases <= 0).
        slope: of ALiBi, 0 for none.
    """

    norm: str
    keys: float
    mask: str
    slope: float = 0.0

    @property
    def log_mass(self) -> float:
        """ln B."""
        return log_mass(self.keys, self.slope)

    def column(self) -> Column | None:
        """S, or None if it has no bound."""
        if self.mask == "causal":
            finite = self.keys < math.inf or self.slope
            return causal_column(self.keys, self.slope) if finite else None
        if self.keys == math.inf:
            return full_column if self.mask == "none" else None
        column = any_column(self.keys)
        if self.mask == "any":
            return column
        return lambda r, y: torch.minimum(full_column(r, y), column(r, y))


def _gains(
    norm: str, log_b: float, column_of: Callable[[], Column | None], r: Tensor, known: Tensor
) -> Tensor:
    """The bounds for radii r (K, 1); free numbers are searched for those in ``known`` alone."""
    if log_b == -math.inf:
        return torch.ones_like(r)  # every token sees itself alone
    most = enlarge(spread(log_b))
    if norm == "token":
        return token_gains(r, most)
    if norm == "self":
        return self_gains(r, log_b)
    column = column_of()
    if column is None:
        return torch.full_like(r, math.inf)
    near = (r.log() - known.log().mT).abs().argmin(1)
    y, omega = search(known, column, most)
    return theorem_f(r, (y[near], omega[near]), column, most, _FINE)


def _gain(norm: str, log_b: float, column_of: Callable[[], Column | None], r: float) -> float:
    if r > LARGEST:
        return math.inf
    radius = torch.tensor([[r]], dtype=torch.float64)
    return _gains(norm, log_b, column_of, radius, radius).item()


@functools.lru_cache(maxsize=4096)
def ball_gain(rows: Rows, r: float) -> float:
    """Theorem F for one radius, without a dense bias."""
    return _gain(rows.norm, rows.log_mass, rows.column, r)


def dense_ball_gain(b: Tensor, norm: str, r: float) -> float:
    """Theorem F for one radius under a bias (N, N) with own entries -inf."""
    log_b = dense_log_mass(b)
    if log_b > -math.inf:
        log_b += 1e-12 * (1 + abs(log_b))  # for the rounding of the sum
    return _gain(norm, log_b, functools.partial(bias_column, b), r)


FIRST, STEP, KNOTS = math.log(0.1), 0.1, 49
"""The knots of `ball_knots` are at ln r = FIRST + k STEP."""

# Radii between two knots at which the line is held above the bound.
_BETWEEN = 32


@functools.lru_cache(maxsize=256)
def ball_knots(rows: Rows) -> tuple[float, ...]:
    r"""Values at the knots of r whose linear interpolation in ln r is never below Theorem F.

    Between neighbours of a finer grid the gain is at most the bound at the larger one. The line is held
    above it there, by raising both ends of a cell.
    """
    fine = FIRST + STEP / _BETWEEN * torch.arange((KNOTS - 1) * _BETWEEN + 1, dtype=torch.float64)
    # For the rounding of logarithms, here and of the radius.
    r = (fine.exp() * (1 + 1e-9))[:, None]
    bound = _gains(rows.norm, rows.log_mass, rows.column, r, r[::_BETWEEN])[:, 0]
    value = bound[::_BETWEEN]
    if not bool(value.isfinite().all()):
        return (math.inf,) * KNOTS
    share = torch.arange(_BETWEEN, dtype=torch.float64) / _BETWEEN
    line = value[:-1, None] + (value[1:] - value[:-1])[:, None] * share
    short = (bound[1:].reshape(-1, _BETWEEN) - line).amax(1).clamp_min(0.0)
    pad = torch.zeros(1, dtype=torch.float64)
    raised = value + torch.maximum(torch.cat([pad, short]), torch.cat([short, pad]))
    return tuple(enlarge(torch.cummax(raised, 0).values).tolist())
