r"""x + f(x) = y for a causal f of which only each token's own map contracts (Theorem E).

All tokens are iterated at once. The Jacobian of a plain step is block triangular with diagonal blocks
of norm at most c, so that near the solution the steps converge as fast as for one token; but before, a
token that is still wrong can push later ones far away. Where plain steps do not progress, the solved
prefix is locked, and tokens after the first unsolved one (the front) are held back where they run off.
Given the locked tokens the front converges at the certified rate, whatever the others do; in the worst
case the tokens are solved one after another. What is promised holds however the point was found.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from lipformer.flows.solve.anderson import History
from lipformer.flows.solve.fixed_point import (
    PATIENCE,
    ROUNDING,
    SLACK,
    Branch,
    NotConverged,
    Record,
    Steps,
    allowed_error,
    check_problem,
    largest_entry,
)
from lipformer.flows.solve.norms import token_size
from lipformer.flows.solve.rounding import rounding_of
from lipformer.functional.rounding import enlarge

# Tokens after the front stay within this multiple of the sizes known so far.
REACH = 4.0
MEMORY = 8


def solve_causal(
    branch: Branch,
    y: Tensor,
    *,
    rate: float,
    tol: float = 1e-6,
    max_iter: int = 1000,
    accelerate: bool | None = None,
    promise: bool = True,
) -> tuple[Tensor, Record]:
    r"""Solves x + f(x) = y for each sample, f causal, its own-token maps contractions.

    With the earlier tokens as returned, the error of token i is at most
    :math:`\frac{1}{1-c} \|x_i + f_i(x) - y_i\|_2` (docs/theory, section 5): the record's
    ``token_error``. The solve ends when that is at most ``tol`` times max(1, max|y|) for every token,
    or at the limit of precision.

    Args:
        branch: f, called with points (b, T, D) and the indices (b,) of their samples.
        y: (B, T, D).
        rate: :math:`c < 1`: :math:`f_i` contracts by it in token i, in the l2 norm.
        tol: tolerance relative to max(1, max|y|).
        max_iter: most evaluations of f for one token after the earlier ones are solved.
        accelerate: solve in turn, with Anderson acceleration token by token, or without any; None:
            acceleration of memory one for all tokens at once (:class:`Steps`), in turn where that does
            not progress.
        promise: as in :func:`solve_fixed_point`.

    Returns:
        x (B, T, D) and the record.

    Raises:
        NotConverged: some token needs more evaluations, or does not contract as promised.
        ValueError: y is not finite, a number is out of its range, or f is not causal.
    """
    check_problem(y, rate, tol, max_iter)
    tolerance = allowed_error(y, tol)
    everyone = torch.arange(y.shape[0], device=y.device)
    evaluations, converged, left = torch.zeros_like(everyone), True, everyone
    solution = images = y
    if y.numel() and accelerate is not True:
        steps = _AllTokens(branch, y, token_size, rate, tolerance * (1.0 - rate), accelerate)
        if not promise:
            steps.leaks = False  # a Jacobian, which takes each sample once
        solution, images, evaluations = steps.run(max_iter)
        left = steps.given_up.to(y.device)
    if y.numel() and len(left):
        x, image, counts, converged = _in_turn(
            lambda x, index: branch(x, left[index]),
            y[left],
            rate=rate,
            tol=tol,
            max_iter=max_iter,
            accelerate=accelerate is not False,
        )
        solution, images = (t.index_copy(0, left, u) for t, u in ((solution, x), (images, image)))
        evaluations = evaluations.index_add(0, left, counts)
    residual = (images.double() - solution.double()).norm(dim=-1)
    noise = torch.full_like(residual, torch.inf)
    if promise and converged:
        noise = rounding_of(lambda x: branch(x, everyone), y, solution, images, 1).norm(dim=-1)
    error = enlarge((residual + noise) / (1.0 - rate), y.shape[-1])
    largest, promised = (size.amax(1) if y.shape[1] else size.sum(1) for size in (residual, error))
    record = Record(evaluations, largest, promised, converged, tolerance, error)
    if not converged:
        raise NotConverged(record, max_iter)
    return solution, record


class _AllTokens(Steps):
    """Steps of all tokens at once, as long as the largest residual of a sample falls.

    In the first evaluation one sample has a twin with other tokens in its second half. Where f is causal
    it gives the same for the first half; else (:attr:`leaks`) all samples are given up.
    """

    leaks: bool | None = None

    def value(self) -> Tensor:
        half = self.y.shape[1] // 2
        if self.leaks is not None or not half:
            return super().value()
        x = self.x
        twin = torch.cat([x[:1, :half], 1.0 - x[:1, half:]], 1)
        value = self.branch(torch.cat([x, twin]), torch.cat([self.index, self.index[:1]]))
        one, other = value[:1, :half], value[-1:, :half]
        noise = 16.0 * ROUNDING * torch.finfo(x.dtype).eps * token_size(x[:1, :half].abs() + one.abs())
        self.leaks = bool(token_size(one - other) > noise)
        return value[:-1]

    def hopeless(self) -> Tensor:
        return (self.waited >= PATIENCE) | torch.isinf(self.best) | bool(self.leaks)


def _in_turn(
    branch: Branch, y: Tensor, *, rate: float, tol: float, max_iter: int, accelerate: bool
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Solves with the solved prefix locked; arguments as above.

    Returns:
        x (B, T, D), y - f(x), the evaluations (B,), and whether all converged.
    """
    solution, images = y.clone(), y.clone()
    evaluations = torch.zeros(len(y), dtype=torch.long, device=y.device)
    state = _State.start(y, tol)
    converged = True
    while converged and state.index.numel():
        state = state.evaluate(branch, rate)
        evaluations[state.index] += 1
        spent = state.since >= max_iter
        ended = (state.front == y.shape[1]) | spent
        converged = not bool(spent.any())
        if bool(ended.any()):
            index = state.index[ended]
            solution[index], images[index] = state.x[ended], state.image[ended]
            if converged:
                _check_causal(state.size[ended], state.locked_size[ended], state.noise[ended])
            state = state.select(~ended)
        if state.index.numel():
            state = state.advance(rate, accelerate)
    return solution, images, evaluations, converged


def _check_causal(size: Tensor, locked: Tensor, noise: Tensor) -> None:
    """A locked token whose residual changed depends on later ones: the promise would be void."""
    moved = size > 2.0 * locked + 16.0 * noise
    if bool(moved.any()):
        raise ValueError(
            f"the branch is not causal: {int(moved.sum())} solved tokens changed with later ones"
        )


@dataclass(frozen=True, kw_only=True)
class _State:
    """The samples not yet solved (b, T, D), and how far each of their tokens (b, T) has come.

    The best residual is that since the token came to the front or, later, since the start.

    Attributes:
        index: the samples' places in the batch.
        y: right-hand sides.
        x: points to evaluate next, final in the locked prefix.
        limit: tolerance of the error (b, 1).
        scale: max(1, max|y|) (b, 1).
        image: latest y - f(x).
        size: latest residual.
        best_size: smallest residual, at the point with the image ``best_image``.
        mark: residual that counts as progress once undercut, ``waited`` evaluations ago.
        noise: rounding of the latest residual.
        locked_size: residual when the token was locked.
        first: residual when the token came to the front.
        front: number of locked tokens (b,).
        since: evaluations since the front moved (b,).
        history: past points, by token.
    """

    index: Tensor
    y: Tensor
    x: Tensor
    limit: Tensor
    scale: Tensor
    image: Tensor
    size: Tensor
    best_size: Tensor
    best_image: Tensor
    mark: Tensor
    waited: Tensor
    noise: Tensor
    locked_size: Tensor
    first: Tensor
    front: Tensor
    since: Tensor
    history: History | None = None

    @classmethod
    def start(cls, y: Tensor, tol: float) -> _State:
        far, scale = y.new_full(y.shape[:2], torch.inf), largest_entry(y)[:, None]
        index = torch.arange(y.shape[0], device=y.device)
        none = torch.zeros_like(index)
        return cls(
            index=index,
            y=y,
            x=y,
            limit=tol * scale,
            scale=scale,
            image=y,
            size=far,
            best_size=far,
            best_image=y,
            mark=far,
            waited=torch.zeros_like(far, dtype=torch.long),
            noise=torch.zeros_like(far),
            locked_size=far,
            first=far,
            front=none,
            since=none,
        )

    def select(self, kept: Tensor) -> _State:
        """The samples of a mask."""
        names = [f.name for f in fields(self) if f.name != "history"]
        history = self.history
        if history is not None:
            history = history.select(kept.repeat_interleave(len(history.image) // len(kept)))
        return replace(self, **{name: getattr(self, name)[kept] for name in names}, history=history)

    def evaluate(self, branch: Branch, rate: float) -> _State:
        """Runs the branch once and locks the prefix that is solved at this point."""
        value = branch(self.x, self.index)
        image = self.y - value
        residual = image - self.x
        size = residual.norm(dim=-1)
        size = torch.where(torch.isfinite(size), size, torch.inf)
        eps = torch.finfo(self.y.dtype).eps
        noise = ROUNDING * eps * (self.y.abs() + self.x.abs() + value.abs()).norm(dim=-1)
        progress = size <= self.mark
        mark = torch.where(progress, size * rate ** (PATIENCE / 2), self.mark)
        waited = torch.where(progress, 0, self.waited + 1)

        stalled = (waited >= PATIENCE) & (size <= 16.0 * noise) & torch.isfinite(size)
        solved = (size <= (1.0 - rate) * self.limit) | stalled
        place = torch.arange(size.shape[1], device=size.device)
        locked = place < self.front[:, None]
        front = (solved | locked).long().cumprod(1).sum(1)
        moved = front > self.front
        now_locked = place < front[:, None]
        at_front = place == front[:, None]

        better = size < self.best_size
        # The token that comes to the front starts afresh: before, it solved another equation.
        afresh = at_front & moved[:, None]
        unsettled = afresh & (size > 16.0 * noise)
        flat = image.flatten(0, 1), residual.flatten(0, 1)
        if self.history is None:
            history = History.start(*flat, memory=MEMORY)
        else:
            history = self.history.add(*flat).clear(afresh.flatten())
        return replace(
            self,
            size=size,
            noise=noise,
            locked_size=torch.where(now_locked & ~locked, size, self.locked_size),
            image=image,
            best_size=torch.where(better | afresh, size, self.best_size),
            best_image=torch.where((better | afresh)[..., None], image, self.best_image),
            mark=torch.where(unsettled, size * rate ** (PATIENCE / 2), mark),
            waited=torch.where(unsettled, 0, waited),
            first=torch.where(afresh | torch.isinf(self.first), size, self.first),
            front=front,
            since=torch.where(moved, 0, self.since + 1),
            history=history,
        )

    def advance(self, rate: float, accelerate: bool) -> _State:
        """The next points: locked tokens stay, the front is safeguarded, later tokens held back."""
        place = torch.arange(self.size.shape[1], device=self.size.device)
        locked = (place < self.front[:, None])[..., None]
        at_front = place == self.front[:, None]
        following = torch.where(at_front[..., None], self.best_image, self.image)
        if accelerate and self.history is not None and self.history.count:
            point = self.history.next_point()[0].view_as(self.y)
            due = self.first * rate ** (self.since[:, None] - SLACK).to(self.first.dtype)
            ahead = (self.best_size <= due) | ~at_front
            ahead = ahead & torch.isfinite(point).all(-1)
            following = torch.where(ahead[..., None], point, following)
        known = torch.where(locked, self.x.abs(), 0.0).flatten(1).amax(1)[:, None]
        reach = REACH * torch.maximum(self.scale, known)
        # Not <=, so that NaN is held back too. The front itself may go as far as it must.
        wild = ~(following.abs().amax(-1) <= reach)
        wild = wild & (~at_front | ~torch.isfinite(following).all(-1))
        following = torch.where(wild[..., None], self.y, following)
        return replace(self, x=torch.where(locked, self.x, following))
