r"""Fixed points x = y - f(x) of a contraction f, with an error bound that is a promise.

Anderson acceleration is used as far as it keeps up with the certified rate; where it does not, the
next point is a plain step from the best point so far, which the rate guarantees. A sample that has
converged is taken out: it costs nothing more and changes no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lipformer.flows.solve.anderson import History
from lipformer.flows.solve.norms import Measure
from lipformer.flows.solve.rounding import rounding_of
from lipformer.functional.rounding import enlarge

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

Branch = Callable[[Tensor, Tensor], Tensor]
_U = TypeVar("_U", bound="Unsolved")


@dataclass(frozen=True)
class Record:
    """What a solve did.

    Attributes:
        evaluations: evaluations of the branch for each sample (B,).
            One more, in float64, tells their rounding.
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
        """Whether the promised error is within the tolerance: False at the limit of precision."""
        return bool((self.error_bound <= self.tolerance).all())


class NotConverged(RuntimeError):
    """A solve that ran out of evaluations. Its ``record`` says how far it came.

    Args:
        record: of the solve.
        max_iter: evaluations that were allowed.
        told: what to say instead.
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
    accelerate: bool = True,
    promise: bool = True,
) -> tuple[Tensor, Record]:
    r"""Solves x + f(x) = y for each sample.

    For a plain step :math:`x' = y - f(x)` the error is at most
    :math:`\frac{c}{1-c}\,\|x + f(x) - y\|` (docs/theory, section 5), whatever x is; the solve stops
    when that is at most ``tol`` times max(1, max|y|). A tolerance below the precision of y is no
    error: the solve then goes to the limit of precision, and ``error_bound`` says where that is.

    Args:
        branch: f, called with points (b, *) and the indices (b,) of their samples.
        y: (B, *), at least one entry per sample.
        rate: :math:`c < 1`, certified: f contracts by it in the norm that ``measure`` computes.
        measure: the norm of each sample, (b, *) -> (b,).
        tol: tolerance relative to max(1, max|y|).
        max_iter: most evaluations of f for a sample.
        accelerate: use Anderson acceleration.
        promise: bound the error; without, f need not run in float64 and the bound is infinite.

    Returns:
        x (B, *) and the record.

    Raises:
        NotConverged: some sample needs more evaluations, or f does not contract as promised.
        ValueError: y is not finite, or a number is out of its range.
    """
    check_problem(y, rate, tol, max_iter)
    point, solution = y.clone(), y.clone()
    everyone = torch.arange(y.shape[0], device=y.device)
    evaluations = torch.zeros_like(everyone)
    if y.numel() == 0:
        none = torch.zeros_like(evaluations, dtype=torch.float64)
        return solution, Record(evaluations, none, none, True, allowed_error(y, tol))
    state = _State.start(y, tol * largest_entry(y))
    for k in range(max_iter):
        if state.index.numel() == 0:
            break
        state = state.evaluate(branch, measure, rate)
        evaluations[state.index] = k + 1
        if k == 0 and not bool(torch.isfinite(state.size).all()):
            raise ValueError(
                f"the branch overflows {y.dtype} at y (largest entry {float(y.abs().max()):.3g}): "
                "rescale y, use a wider dtype, and look whether the weights are finite"
            )
        done = rate / (1.0 - rate) * state.best_size <= state.limit
        done = done | ((state.waited >= PATIENCE) & (state.best_size <= 16.0 * state.noise))
        if bool(done.any()) or k + 1 == max_iter:
            point[state.index], solution[state.index] = state.best_x, state.best_image
            state = state.select(~done)
        if state.index.numel():
            state = state.remember().advance() if accelerate else state.plain()
    residual = measure(solution.double() - point.double())
    noise = torch.full_like(residual, torch.inf)
    if promise:
        tokens = y.shape[1] if y.ndim > 2 else 1
        noise = measure(rounding_of(lambda x: branch(x, everyone), y, point, solution, tokens))
    error = enlarge((rate * residual + noise) / (1.0 - rate), y[:1].numel())
    record = Record(evaluations, residual, error, state.index.numel() == 0, allowed_error(y, tol))
    if not record.converged:
        raise NotConverged(record, max_iter)
    return solution, record


@dataclass(frozen=True, kw_only=True)
class Unsolved:
    """The samples not yet solved, of shape (b, *), and how far each problem has come.

    A problem is a sample, (b,), or in causal mode a token, (b, T).

    Attributes:
        index: the samples' places in the batch.
        y: right-hand sides.
        x: points to evaluate next.
        limit: tolerance of the error.
        image: latest y - f(x).
        size: latest residual.
        best_size: smallest residual, at the point with the image ``best_image``.
        mark: residual that counts as progress once undercut, ``waited`` evaluations ago.
        noise: rounding of the best residual, in causal mode of the latest.
        history: past points, by problem.
    """

    index: Tensor
    y: Tensor
    x: Tensor
    limit: Tensor
    image: Tensor
    size: Tensor
    best_size: Tensor
    best_image: Tensor
    mark: Tensor
    waited: Tensor
    noise: Tensor
    history: History | None = None

    @staticmethod
    def beginning(y: Tensor, problems: torch.Size) -> dict[str, Any]:
        """The attributes before the first evaluation, but for the limit."""
        far = y.new_full(problems, torch.inf)
        count = torch.zeros(problems, dtype=torch.long, device=y.device)
        index = torch.arange(y.shape[0], device=y.device)
        images = {"y": y, "x": y, "image": y, "best_image": y}
        sizes = {"size": far, "best_size": far, "mark": far, "noise": y.new_zeros(problems)}
        return {"index": index, "waited": count, **images, **sizes}

    def measured(
        self, branch: Branch, measure: Measure, rate: float
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """One evaluation: the image, the residual's size, its rounding, and mark and waited after it."""
        value = branch(self.x, self.index)
        image = self.y - value
        size = measure(image - self.x)
        size = torch.where(torch.isfinite(size), size, torch.inf)
        eps = torch.finfo(self.y.dtype).eps
        noise = ROUNDING * eps * measure(self.y.abs() + self.x.abs() + value.abs())
        progress = size <= self.mark
        mark = torch.where(progress, size * rate ** (PATIENCE / 2), self.mark)
        waited = torch.where(progress, 0, self.waited + 1)
        return image, size, noise, {"mark": mark, "waited": waited}

    def select(self: _U, kept: Tensor) -> _U:
        """The samples of a mask."""
        if bool(kept.all()):
            return self
        names = [f.name for f in fields(self) if f.name != "history"]
        history = self.history
        if history is not None:
            history = history.select(kept.repeat_interleave(len(history.image) // len(kept)))
        return replace(self, **{name: getattr(self, name)[kept] for name in names}, history=history)


@dataclass(frozen=True, kw_only=True)
class _State(Unsolved):
    """Samples as the problems, and what acceleration needs to know.

    Attributes:
        best_x: the point of the smallest residual.
        last: the residual before the latest.
        spread: sum of the inverse squares of the residuals' l2 norms since the history began.
        pace: reduction by the last plain step before acceleration, 0 while steps are plain.
        due: residual that plain steps at that pace would have reached, SLACK evaluations ago.
        trials: how often acceleration may still be tried.
    """

    best_x: Tensor
    last: Tensor
    spread: Tensor
    pace: Tensor
    due: Tensor
    trials: Tensor

    @classmethod
    def start(cls, y: Tensor, limit: Tensor) -> _State:
        shared = cls.beginning(y, y.shape[:1])
        zero, trials = shared["noise"], shared["waited"] + TRIALS
        return cls(
            **shared,
            limit=limit,
            best_x=y,
            last=shared["size"],
            spread=zero,
            pace=zero,
            due=zero,
            trials=trials,
        )

    def evaluate(self, branch: Branch, measure: Measure, rate: float) -> _State:
        """Runs the branch once and keeps the best point by its residual."""
        image, size, noise, progress = self.measured(branch, measure, rate)
        better = size < self.best_size
        return replace(
            self,
            **progress,
            image=image,
            size=size,
            last=self.size,
            best_size=torch.where(better, size, self.best_size),
            best_x=torch.where(_wide(better, image), self.x, self.best_x),
            best_image=torch.where(_wide(better, image), image, self.best_image),
            noise=torch.where(better, noise, self.noise),
        )

    def remember(self) -> _State:
        """The state with its latest point in the history."""
        image = self.image.flatten(1)
        residual = image - self.x.flatten(1)
        least = torch.finfo(image.dtype).tiny ** 0.5
        return replace(
            self,
            spread=self.spread + residual.norm(dim=1).clamp_min(least).pow(-2),
            history=(
                History.start(image, residual)
                if self.history is None
                else self.history.add(image, residual)
            ),
        )

    def plain(self) -> _State:
        """A plain step, from the best point where the latest is lost."""
        lost = ~(self.size <= 2.0 * self.best_size)
        return replace(self, x=torch.where(_wide(lost, self.image), self.best_image, self.image))

    def advance(self) -> _State:
        """The next points: accelerated where that is ahead of plain steps, else plain from the best.

        Plain steps come first; their points span the space that acceleration searches, so that
        nothing is lost. It begins when a combination of them has a residual clearly smaller than if
        their residuals were orthogonal, spread**-1/2, as those of a rotation nearly are:
        there it gains nothing in the end. It is given up where it falls behind the pace of the plain
        steps before it.
        """
        history = self.history
        if history is None or not history.count:
            return self.plain()
        # Late in a solve chance correlations are frequent, so it is looked for ever more rarely.
        look = history.count <= 8 or history.count.bit_count() == 1
        if not look and not bool((self.pace > 0).any()):
            return self.plain()
        point, rest = (part.view_as(self.y) for part in history.next_point())
        running = self.pace > 0
        due = torch.where(running, torch.minimum(self.due * self.pace, self.size), self.due)
        failed = running & ~(self.best_size <= due * self.pace**-SLACK)
        # k random directions of n shrink any residual by this factor; all n of them, to zero.
        k, n = min(history.count, history.steps.shape[1]), history.image.shape[1]
        chance = (1.0 - k / n) ** 0.5 if k < n else torch.inf
        promising = rest.flatten(1).norm(dim=1) < GAIN * chance * self.spread.rsqrt()
        begins = ~running & promising & look & (self.trials > 0) & (self.size < self.last)
        goes = (running & ~failed) | begins
        goes = goes & torch.isfinite(point.flatten(1)).all(1)
        plain = torch.where(_wide(running, point), self.best_image, self.plain().x)
        pace = torch.where(begins, (self.size / self.last) ** EDGE, self.pace)
        return replace(
            self,
            x=torch.where(_wide(goes, point), point, plain),
            spread=torch.where(failed, 0.0, self.spread),
            pace=torch.where(goes, pace, 0.0),
            due=torch.where(begins, self.size, due),
            trials=self.trials - begins.long(),
            history=history.clear(failed),
        )


def _wide(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (like.ndim - 1))
