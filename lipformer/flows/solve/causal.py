r"""x + f(x) = y for a causal f of which only each token's own map contracts (Theorem E).

All tokens are iterated at once, but an earlier token that is still wrong can push later ones far away.
So the solved prefix is locked, and tokens after the first unsolved one (the front) are held back where
they run off. Given the locked tokens the front converges at the certified rate, whatever the others do;
in the worst case the tokens are solved one after another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipformer.flows.solve.anderson import History
from lipformer.flows.solve.fixed_point import (
    PATIENCE,
    SLACK,
    Branch,
    NotConverged,
    Record,
    Unsolved,
    allowed_error,
    check_problem,
    largest_entry,
)
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
    accelerate: bool = True,
    promise: bool = True,
) -> tuple[Tensor, Record]:
    r"""Solves x + f(x) = y for each sample, f causal, its own-token maps contractions.

    With the earlier tokens as returned, the error of token i is at most
    :math:`\frac{1}{1-c} \|x_i + f_i(x) - y_i\|_2` (docs/theory, section 5): the record's
    ``token_error``. A token is locked when that is at most ``tol`` times max(1, max|y|), or at the limit
    of precision, and all earlier ones are locked.

    Args:
        branch: f, called with points (b, T, D) and the indices (b,) of their samples.
        y: (B, T, D).
        rate: :math:`c < 1`: :math:`f_i` contracts by it in token i, in the l2 norm.
        tol: tolerance relative to max(1, max|y|).
        max_iter: most evaluations of f for one token after the earlier ones are solved.
        accelerate: use Anderson acceleration, token by token.
        promise: as in :func:`solve_fixed_point`.

    Returns:
        x (B, T, D) and the record.

    Raises:
        NotConverged: some token needs more evaluations, or does not contract as promised.
        ValueError: y is not finite, a number is out of its range, or f is not causal.
    """
    check_problem(y, rate, tol, max_iter)
    tokens = y.shape[1]
    solution, images = y.clone(), y.clone()
    everyone = torch.arange(y.shape[0], device=y.device)
    evaluations = torch.zeros_like(everyone)
    state = _State.start(y, tol)
    converged = True
    while converged and state.index.numel() and tokens:
        state = state.evaluate(branch, rate)
        evaluations[state.index] += 1
        spent = state.since >= max_iter
        ended = (state.front == tokens) | spent
        converged = not bool(spent.any())
        if bool(ended.any()):
            index = state.index[ended]
            solution[index], images[index] = state.x[ended], state.image[ended]
            if converged:
                _check_causal(state.size[ended], state.locked_size[ended], state.noise[ended])
            state = state.select(~ended)
        if state.index.numel():
            state = state.advance(rate, accelerate)
    residual = (images.double() - solution.double()).norm(dim=-1)
    noise = torch.full_like(residual, torch.inf)
    if promise and converged:
        noise = rounding_of(lambda x: branch(x, everyone), y, solution, images, 1).norm(dim=-1)
    error = enlarge((residual + noise) / (1.0 - rate), y.shape[-1])
    largest, promised = (size.amax(1) if tokens else size.sum(1) for size in (residual, error))
    record = Record(evaluations, largest, promised, converged, allowed_error(y, tol), error)
    if not converged:
        raise NotConverged(record, max_iter)
    return solution, record


def _check_causal(size: Tensor, locked: Tensor, noise: Tensor) -> None:
    """A locked token whose residual changed depends on later ones: the promise would be void."""
    moved = size > 2.0 * locked + 16.0 * noise
    if bool(moved.any()):
        raise ValueError(
            f"the branch is not causal: {int(moved.sum())} solved tokens changed with later ones"
        )


@dataclass(frozen=True, kw_only=True)
class _State(Unsolved):
    """Tokens as the problems, ``x`` being final in the locked prefix, and how far it has come.

    The best residual is that since the token came to the front or, later, since the start.

    Attributes:
        scale: max(1, max|y|) (b, 1).
        locked_size: residual when the token was locked.
        first: residual when the token came to the front.
        front: number of locked tokens (b,).
        since: evaluations since the front moved (b,).
    """

    scale: Tensor
    locked_size: Tensor
    first: Tensor
    front: Tensor
    since: Tensor

    @classmethod
    def start(cls, y: Tensor, tol: float) -> _State:
        shared = cls.beginning(y, y.shape[:2])
        far, scale = shared["size"], largest_entry(y)[:, None]
        none = torch.zeros_like(shared["index"])
        return cls(
            **shared, limit=tol * scale, scale=scale, locked_size=far, first=far, front=none, since=none
        )

    def evaluate(self, branch: Branch, rate: float) -> _State:
        """Runs the branch once and locks the prefix that is solved at this point."""
        image, size, noise, progress = self.measured(branch, lambda x: x.norm(dim=-1), rate)
        residual, mark, waited = image - self.x, progress["mark"], progress["waited"]

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
