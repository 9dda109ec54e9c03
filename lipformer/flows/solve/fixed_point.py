r"""Fixed points x = y - f(x) of a contraction f, with an error bound that is a promise.

Anderson acceleration is used as far as it keeps up with the certified rate; where it does not, the
next point is a plain step from the best point so far, which the rate guarantees. A sample that has
converged is taken out: it costs nothing more and changes no more. What decides, a few numbers for each
sample, is read once an evaluation and kept by the host: a step launches a dozen small kernels beside f.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipformer.flows.solve.anderson import History
from lipformer.flows.solve.norms import Measure
from lipformer.flows.solve.rounding import evaluate_widely, rounding_of
from lipformer.functional.rounding import enlarge
from lipformer.functional.wide import DISTURBANCE

# Anderson's method with a long memory is looked for where steps at their present pace would need so many
# more evaluations: it launches three times the kernels of a small branch.
SLOW = 40
# How many evaluations acceleration may lie behind plain steps before it is given up.
SLACK = 2
# It must be faster than plain steps by this power of their reduction, to be worth its risk.
EDGE = 1.2
# How often it is tried.
TRIALS = 2
# A combination of past points must beat what unrelated directions would give by this factor.
GAIN = 0.2
# A residual near the precision that has not fallen in so many evaluations is rounding.
PATIENCE = 6
# Rounding of one evaluation of x + f(x) - y, in units of eps times the size of its terms: a model that
# tells when a residual cannot be expected to fall. What is promised is measured.
ROUNDING = 4.0
# Rounding of an evaluation in float64, in units of that in a narrower dtype: float32 has 2^-29.
WIDE_ROUNDING = 2.0**-16

Branch = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Record:
    """Record of a solve: evaluations, residual and error bound.

    Attributes:
        evaluations: evaluations of the branch for each sample (B,).
            One more, in float64, tells their rounding; where y is not float64 it is the last step too.
        residual: size of x + f(x) - y at the last evaluation (B,), in the norm of the rate.
        error_bound: promised bound of the error of x (B,), in that norm, against the solution for f
            in exact arithmetic; rounding inside f is measured (:func:`rounding_of`). Infinite where f
            cannot be evaluated in float64. In causal mode the largest of ``token_error``.
        converged: whether every sample met its tolerance or the limit of its precision.
        tolerance: the error allowed (B,), tol times max(1, max|y|).
        token_error: causal mode: bound (B, T) of each token's error given the earlier tokens.

    All but ``evaluations`` are in float64.
    """

    evaluations: Tensor
    residual: Tensor
    error_bound: Tensor
    converged: bool
    tolerance: Tensor
    token_error: Tensor | None = None

    @property
    def iterations(self) -> int:
        """The largest number of evaluations of any sample."""
        return int(self.evaluations.max()) if self.evaluations.numel() else 0

    @property
    def met_tolerance(self) -> bool:
        """Whether the error bound is within the tolerance: False at the limit of precision."""
        return bool((self.error_bound <= self.tolerance).all())


class NotConverged(RuntimeError):
    """Raised by a solve that ran out of evaluations; ``record`` has its last state.

    Args:
        record: of the solve.
        max_iter: evaluations that were allowed.
        told: another message.
    """

    def __init__(self, record: Record, max_iter: int, told: str = "") -> None:
        self.record = record
        residual, error = float(record.residual.max()), float(record.error_bound.max())
        super().__init__(
            told
            or f"no convergence in max_iter={max_iter} evaluations: residual {residual:.3g}, "
            f"error bound {error:.3g}; allow more evaluations, a larger tol, or use a smaller coeff"
        )


def check_problem(y: Tensor, rate: float, tol: float, max_iter: int) -> None:
    """Raises ValueError unless the problem can be solved."""
    if not 0.0 < rate < 1.0:
        raise ValueError(f"rate must lie between 0 and 1, got {rate!r}")
    if not 0.0 <= tol < float("inf"):
        raise ValueError(f"tol must be at least 0 and finite, got {tol!r}")
    if max_iter < 1:
        raise ValueError(f"max_iter must be at least 1, got {max_iter!r}")
    bad = int((~torch.isfinite(y)).sum())
    if bad:
        raise ValueError(f"y must be finite, got {bad} NaN or infinite entries of {y.numel()}")


def largest_entry(y: Tensor) -> Tensor:
    """max(1, max|y|) of each sample, (B, *) -> (B,): what tolerances are relative to."""
    if y.numel() == 0:
        return y.new_ones(y.shape[0])
    return y.flatten(1).abs().amax(1).clamp_min(1.0)


def allowed_error(y: Tensor, tol: float) -> Tensor:
    """tol max(1, max|y|) of each sample (B,), in float64."""
    return tol * largest_entry(y).double()


def solve_fixed_point(
    branch: Branch,
    y: Tensor,
    *,
    rate: float,
    measure: Measure,
    tol: float = 1e-6,
    max_iter: int = 1000,
    accelerate: bool | None = None,
    promise: bool = True,
) -> tuple[Tensor, Record]:
    r"""Solves x + f(x) = y for each sample.

    For a plain step :math:`x' = y - f(x)` the error is at most
    :math:`\frac{c}{1-c}\,\|x + f(x) - y\|` (docs/theory, section 5), whatever x is; the solve stops
    when that is at most ``tol`` times max(1, max|y|). A tolerance below the precision of y is no
    error: the solve then goes to the limit of precision, and ``error_bound`` says where that is.
    Where y is not float64 a promise takes a last step in float64, whose rounding does not count.

    Args:
        branch: f, called with points (b, *) and the indices (b,) of their samples.
        y: (B, *), at least one entry per sample.
        rate: :math:`c < 1`, certified: f contracts by it in the norm that ``measure`` computes.
        measure: the norm of each sample, (b, *) -> (b,).
        tol: tolerance relative to max(1, max|y|).
        max_iter: most evaluations of f for a sample.
        accelerate: use Anderson acceleration, or plain steps alone; None: acceleration of memory one
            (:class:`Steps`), and the full one where that turns out to be slow.
        promise: bound the error; without, f need not run in float64 and the bound is infinite.

    Returns:
        x (B, *) and the record.

    Raises:
        NotConverged: some sample needs more evaluations, or f does not contract as promised.
        ValueError: y is not finite, or a number is out of its range.
    """
    check_problem(y, rate, tol, max_iter)
    tolerance = allowed_error(y, tol)
    if y.numel() == 0:
        none = torch.zeros_like(tolerance)
        return y.clone(), Record(none.long(), none, none, True, tolerance)
    enough = tolerance * ((1.0 - rate) / rate)
    kind = _Accelerated if accelerate else _Samples
    steps: _Samples = kind(branch, y, measure, rate, enough, accelerate)
    steps.wide_end = wide_end = promise and torch.finfo(y.dtype).eps > DISTURBANCE
    point, solution, counts = steps.run(max_iter)
    left = steps.given_up.to(y.device)
    spared = max_iter - int(counts[left].max()) if len(left) else 0
    if accelerate is None and spared > 0:
        steps = _Accelerated(
            lambda x, index: branch(x, left[index]), y[left], measure, rate, enough[left], True
        )
        steps.wide_end, steps.x = wide_end, solution[left]
        results = steps.run(spared)
        point, solution = (
            t.index_copy(0, left, u) for t, u in ((point, results[0]), (solution, results[1]))
        )
        counts = counts.index_add(0, left, results[2])
    residual = measure(solution.double() - point.double())
    rounded, noise = torch.zeros_like(residual), torch.full_like(residual, torch.inf)

    def whole(x: Tensor) -> Tensor:
        return branch(x, torch.arange(y.shape[0], device=y.device))

    value = evaluate_widely(whole, solution) if wide_end else None
    if value is not None:
        solution, residual, noise, rounded = _wide_step(
            y.double() - value, solution, residual, y, measure
        )
    elif promise and not wide_end:
        tokens = y.shape[1] if y.ndim > 2 else 1
        noise = measure(rounding_of(whole, y, point, solution, tokens))
    error = enlarge((rate * residual + noise) / (1.0 - rate) + rounded, y[:1].numel())
    record = Record(counts, residual, error, not len(steps.given_up), tolerance)
    if not record.converged:
        raise NotConverged(record, max_iter)
    return solution, record


def _wide_step(
    image: Tensor, last: Tensor, before: Tensor, y: Tensor, measure: Measure
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last step, in float64.

    Args:
        image: y - f(x) in float64 (B, *).
        last: x (B, *).
        before: residual of the step before (B,).
        y: right-hand sides (B, *).
        measure: the norm.

    Returns:
        The image in the dtype of y, the residual at x, its rounding, and that of the image, (B,) each.
    """
    last, finite = last.double(), torch.isfinite(image)
    residual = measure(torch.where(finite, image - last, torch.inf))
    image = torch.where(finite, image, last)
    solution = image.to(y.dtype)
    # The step before was off by at most the residuals at its two ends together.
    noise = WIDE_ROUNDING * (before + residual) + 2.0**-51 * measure(y.double().abs() + image.abs())
    return solution, residual, noise, measure(solution.double() - image)


class Steps:
    r"""Steps towards x = y - f(x) of the samples not yet solved: plain ones, or secant steps.

    A plain step goes to the image :math:`g_k = y - f(x_k)`. A secant step, Anderson's of memory one,
    goes to the point between the last two images at which their residuals :math:`r = g - x` combined
    are smallest, :math:`g_k - \gamma (g_k - g_{k-1})` with
    :math:`\gamma = \langle r_k, r_k - r_{k-1} \rangle / \|r_k - r_{k-1}\|^2`. It is taken as long as
    residuals fall by the certified rate, which plain steps from the best point do always.

    Points (b, *) are where y is; the numbers that decide, (b,) in float64, are on the host.

    Attributes:
        index: the samples' places in the batch, on the device of y; ``place`` on the host.
        y: right-hand sides.
        x: points to evaluate next.
        image: latest y - f(x), with the residual ``residual``; ``before`` has the pair before it.
        size: norm of the latest residual; ``last`` of the one before.
        best: smallest residual, at ``best_x`` with the image ``best_image``.
        mark: residual that counts as progress once undercut, ``waited`` evaluations ago.
        enough: residual that solves.
        floor: a residual of one rounding of its terms y, x and f(x): at least twice y together.
        trials: how many more accelerated steps, or phases of them, may fail; 0 for none at all.
        given_up: places of the samples that were not solved.
    """

    def __init__(
        self,
        branch: Branch,
        y: Tensor,
        measure: Measure,
        rate: float,
        enough: Tensor,
        accelerate: bool | None,
    ) -> None:
        self.branch, self.measure, self.rate = branch, measure, rate
        self.y = self.x = self.image = self.residual = self.best_x = self.best_image = y
        self.before: tuple[Tensor, Tensor] | None = None
        self.index = torch.arange(y.shape[0], device=y.device)
        self.place = torch.arange(y.shape[0])
        self.enough, self.floor = to_host(enough), 2.0 * torch.finfo(y.dtype).eps * to_host(measure(y))
        far = torch.full_like(self.floor, torch.inf)
        self.size = self.last = self.best = self.mark = far
        self.waited = torch.zeros_like(self.place)
        self.accelerate = accelerate
        self.trials = torch.full_like(self.place, 0 if accelerate is False else TRIALS)
        self.given_up = self.place[:0]

    def run(self, max_iter: int) -> tuple[Tensor, Tensor, Tensor]:
        """Points (B, *) with their images and the evaluations (B,); ``given_up`` are not solved."""
        y, counts = self.y, torch.zeros_like(self.place)
        point, solution = torch.empty_like(y), torch.empty_like(y)
        for k in range(max_iter):
            self.evaluate()
            counts[self.place] = k + 1
            ended = self.solved()
            lost = ~ended if k + 1 == max_iter else self.hopeless() & ~ended
            self.given_up = torch.cat([self.given_up, self.place[lost]])
            ended = ended | lost
            if bool(ended.all()) and len(ended) == len(y):
                point, solution = self.best_x, self.best_image
            elif bool(ended.any()):
                point[self.index], solution[self.index] = self.best_x, self.best_image
            if bool(ended.all()):
                break
            if bool(ended.any()):
                self.keep(~ended)
            self.advance()
        return point, solution, counts.to(y.device)

    def evaluate(self) -> None:
        """Runs the branch once and keeps the best point by its residual."""
        self.before = None if self.image is self.y else (self.image, self.residual)
        self.image = self.y - self.value()
        self.residual = self.image - self.x
        self.last, self.size = self.size, to_host(self.measure(self.residual))
        better = self.size < self.best
        if bool(better.all()):
            self.best_x, self.best_image = self.x, self.image
        elif bool(better.any()):
            self.best_x = self.choose(better, self.x, self.best_x)
            self.best_image = self.choose(better, self.image, self.best_image)
        self.best = torch.minimum(self.best, self.size)
        progress = self.size <= self.mark
        self.mark = torch.where(progress, self.size * self.rate ** (PATIENCE / 2), self.mark)
        self.waited = torch.where(progress, 0, self.waited + 1)

    def value(self) -> Tensor:
        """f(x)."""
        return self.branch(self.x, self.index)

    def solved(self) -> Tensor:
        """Which samples met their tolerance or the limit of their precision, (b,).

        A plain step of a contraction reduces the residual by the rate: one that does not, when the
        residual is below the rounding of its terms, shows rounding alone.
        """
        found = self.best <= self.enough
        found = found | ((self.best <= self.floor) & ~(self.size <= self.rate * self.last))
        tired = (self.waited >= PATIENCE) & ~found
        if bool(tired.any()):
            terms = self.y.abs() + self.best_x.abs() + (self.y - self.best_image).abs()
            noise = ROUNDING * torch.finfo(self.y.dtype).eps * to_host(self.measure(terms))
            found = found | (tired & (self.best <= 16.0 * noise))
        return found

    def hopeless(self) -> Tensor:
        """Which samples to give up before the last evaluation that is allowed, (b,)."""
        return torch.zeros_like(self.place, dtype=torch.bool)

    def keep(self, kept: Tensor) -> None:
        """Leaves the samples of a mask on the host."""
        rows = kept.nonzero().squeeze(1)
        there = rows.to(self.index.device)
        taken: dict[int, Tensor] = {}

        def take(whole: Tensor) -> Tensor:
            if id(whole) not in taken:
                taken[id(whole)] = whole.index_select(0, there)
            return taken[id(whole)]

        for name in ("index", "y", "image", "residual", "best_x", "best_image"):
            setattr(self, name, take(getattr(self, name)))
        if self.before is not None:
            self.before = take(self.before[0]), take(self.before[1])
        for name in ("place", "enough", "floor", "size", "last", "best", "mark", "waited", "trials"):
            setattr(self, name, getattr(self, name)[rows])

    def advance(self) -> None:
        """The next points: secant steps while they fall as they should, else plain from the best."""
        failed = ~(self.size <= self.rate * self.last)
        self.trials = torch.where(failed, (self.trials - 1).clamp_min(0), self.trials)
        self.plain()
        good = ~failed & (self.trials > 0)
        if self.before is not None and bool(good.any()):
            self.x = self.choose(good, self.secant(*self.before), self.x)

    def plain(self) -> None:
        """A plain step, from the best point where the latest is lost."""
        self.x = self.choose(~(self.size <= 2.0 * self.best), self.best_image, self.image)

    def secant(self, image: Tensor, residual: Tensor) -> Tensor:
        """The point of a secant step from the latest image and the one before."""
        wide = torch.promote_types(image.dtype, torch.float32)  # squares would underflow
        latest = self.residual.flatten(1).to(wide)
        moved = latest - residual.flatten(1)
        share = (latest * moved).sum(1) / moved.square().sum(1)
        share = share.nan_to_num(0.0, 0.0, 0.0).to(image.dtype)
        return torch.lerp(self.image, image, share.view(-1, *[1] * (image.ndim - 1)))

    def choose(self, mask: Tensor, one: Tensor, other: Tensor) -> Tensor:
        """The samples of ``one`` where a mask of the host is true, else of ``other``."""
        if not bool(mask.any()):
            return other
        return torch.where(mask.view(-1, *[1] * (one.ndim - 1)).to(one.device), one, other)


class _Samples(Steps):
    """Steps of whole samples, which are given up where they are slow if Anderson's method may follow.

    Attributes:
        wide_end: a last step in float64 follows.
    """

    wide_end = False

    def solved(self) -> Tensor:
        found = super().solved()
        if not self.wide_end:
            return found
        # At this pace the residual of the last step is rounding alone.
        pace = torch.where(torch.isinf(self.last), 1.0, self.size / self.last)
        return found | ((self.size <= self.floor) & (self.size * pace <= 0.25 * self.floor))

    def hopeless(self) -> Tensor:
        if bool(torch.isinf(self.best).any()):
            raise ValueError(
                f"the branch overflows {self.y.dtype} at y (largest entry "
                f"{float(self.y.abs().max()):.3g}): rescale y, use a wider dtype, and look whether the "
                "weights are finite"
            )
        if self.accelerate is not None:
            return super().hopeless()
        # At the pace of the latest step.
        goal = torch.maximum(self.enough, self.floor).clamp_min(torch.finfo(torch.float64).tiny)
        left = (self.size / goal).log() / (self.last / self.size).clamp_min(1.0).log()
        return left > SLOW


class _Accelerated(_Samples):
    """Steps of Anderson's method where it is ahead of plain ones, else plain ones.

    Attributes:
        history: past points.
        spread: sum of the inverse squares of the residuals' l2 norms since the history began.
        pace: reduction by the last plain step before acceleration, 0 while steps are plain.
        due: residual that plain steps at that pace would have reached, SLACK evaluations ago.
    """

    def __init__(self, *problem: Any) -> None:
        super().__init__(*problem)
        self.history: History | None = None
        self.spread = self.pace = self.due = torch.zeros_like(self.floor)

    def keep(self, kept: Tensor) -> None:
        super().keep(kept)
        for name in ("spread", "pace", "due"):
            setattr(self, name, getattr(self, name)[kept])
        if self.history is not None:
            self.history = self.history.select(kept.to(self.index.device))

    def advance(self) -> None:
        """The next points: accelerated where that is ahead of plain steps, else plain from the best.

        Plain steps come first; their points span the space that acceleration searches, so that
        nothing is lost. It begins when a combination of them has a residual clearly smaller than if
        their residuals were orthogonal, spread**-1/2, as those of a rotation nearly are:
        there it gains nothing in the end. It is given up where it falls behind the pace of the plain
        steps before it.
        """
        self.plain()
        image, residual = self.image.flatten(1), self.residual.flatten(1)
        least = torch.finfo(image.dtype).tiny ** 0.5
        self.spread = self.spread + to_host(residual.norm(dim=1)).clamp_min(least).pow(-2)
        if self.history is None:
            self.history = History.start(image, residual)
            return
        history = self.history = self.history.add(image, residual)
        # Late in a solve chance correlations are frequent, so it is looked for ever more rarely.
        look = history.count <= 8 or history.count.bit_count() == 1
        running = self.pace > 0
        if not look and not bool(running.any()):
            return
        point, rest = history.next_point()
        due = torch.where(running, torch.minimum(self.due * self.pace, self.size), self.due)
        failed = running & ~(self.best <= due * self.pace**-SLACK)
        # k random directions of n shrink any residual by this factor; all n of them, to zero.
        k, n = min(history.count, history.steps.shape[1]), image.shape[1]
        chance = (1.0 - k / n) ** 0.5 if k < n else torch.inf
        remains = to_host(torch.where(torch.isfinite(point).all(1), rest.norm(dim=1), torch.inf))
        promising = remains < GAIN * chance * self.spread.rsqrt()
        begins = ~running & promising & look & (self.trials > 0) & (self.size < self.last)
        goes = ((running & ~failed) | begins) & torch.isfinite(remains)
        self.x = self.choose(running & ~goes, self.best_image, self.x)
        self.x = self.choose(goes, point.view_as(self.y), self.x)
        self.spread = torch.where(failed, 0.0, self.spread)
        pace = torch.where(begins, (self.size / self.last) ** EDGE, self.pace)
        self.pace = torch.where(goes, pace, 0.0)
        self.due = torch.where(begins, self.size, due)
        self.trials = self.trials - begins.long()
        if bool(failed.any()):
            self.history = history.clear(failed.to(image.device))


def to_host(numbers: Tensor) -> Tensor:
    """Numbers in float64 on the host, which waits for them; NaN counts as infinite."""
    numbers = numbers.detach().cpu().double()
    return torch.where(numbers.isnan(), torch.inf, numbers)
