"""Lower estimates of a function's local gain: the operator norm of its Jacobian at one input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipformer.estimates.dual_steps import (
    group_norms,
    groups,
    input_step,
    one_group,
    output_step,
)
from lipformer.estimates.jacobian_products import Linearization, require_finite
from lipformer.estimates.singular_pair import top_singular_pair
from lipformer.functional.norms import check_norm

_PATIENCE = 20  # steps that a start far behind the best one is given to catch up
_STACK_ENTRIES = 2**20  # entries of the largest stack of directions sent through fn at once


@dataclass(frozen=True, eq=False)
class Estimate:
    """A lower estimate of the largest local gain at one input, with the direction that shows it.

    Attributes:
        value: |J v| / |v| for v = `direction`, in `norm`: attained, so never above the true
            local gain beyond the rounding of the products.
        direction: v, of x's shape and of norm one ("l2": Frobenius; "token" and "self": largest
            token; "linf": largest entry).
        iterations: Products with J that were spent.
        converged: Whether the tolerance was met. For "l2" by the residual of the singular pair;
            for the other norms the climb became stationary, possibly at a local maximum.
        norm: The norm of input and output.
    """

    value: float
    direction: Tensor
    iterations: int
    converged: bool
    norm: str


@torch.inference_mode(False)
def estimate_lipschitz(
    fn: Callable[[Tensor], Any],
    x: Tensor,
    *,
    norm: str = "l2",
    tol: float = 1e-4,
    max_iter: int = 200,
    restarts: int = 8,
    generator: torch.Generator | None = None,
) -> Estimate:
    r"""Lower estimate of the local gain sup_v |J v| / |v| of fn at x, J = fn'(x).

        l2     largest singular value of J; |v| is the Frobenius norm of the whole tensor
        token  max_i sup_{|a|=1} sum_j |J_ij^T a|; |v| is the largest Euclidean norm of a token
        self   max_i ||J_ii||, the effect of a token on itself
        linf   largest absolute row sum of J; |v| is the largest absolute entry

    Tokens are the indices of all dimensions but the last. Samples of a batch do not interact, so
    the value of a batch is the largest over its samples. "l2" is found by Lanczos (see
    `top_singular_pair`), the others by a power method (see `dual_steps`). The result is a lower
    estimate at x and says nothing about other inputs.

    Args:
        fn: Maps x to a tensor, or to a tuple whose first element is one (nn.Module or any
            callable). Its mode (train or eval) is not changed; its parameters get no gradient.
        x: The input, (*, N, D), floating point; the work is done in its dtype.
        norm: "l2", "token", "self" or "linf".
        tol: Relative tolerance.
        max_iter: Largest number of steps.
        restarts: Number of random starting directions. For "l2" they span the first search
            space; for "self", every token is tried and this many are refined.
        generator: Source of the starting directions; the result is a function of it.

    Returns:
        An `Estimate`.

    Example:
        >>> import torch
        >>> weight = torch.diag(torch.tensor([3.0, 1.0]))
        >>> x = torch.zeros(4, 2)
        >>> round(estimate_lipschitz(lambda x: x @ weight, x).value, 4)
        3.0
    """
    check_norm(norm)
    require_finite(x, "x")
    jacobian = Linearization(fn, x)
    require_finite(jacobian.output, "fn(x)")
    if norm == "self" and jacobian.output.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"norm='self' needs an output token for each input token, got input shape "
            f"{tuple(x.shape)} and output shape {tuple(jacobian.output.shape)}"
        )
    if norm == "l2":
        direction, iterations, converged = _by_lanczos(
            jacobian, tol, max_iter, random_like(x, restarts, generator)
        )
    elif norm == "self":
        direction, iterations, converged = _by_own_token(
            jacobian, tol, max_iter, restarts, random_like(x, 1, generator)
        )
    else:
        direction, iterations, converged = _by_power(
            jacobian, norm, tol, max_iter, random_like(x, restarts, generator)
        )
    value, direction = _attained(jacobian, direction, norm)
    return Estimate(value, direction, iterations + 1, converged, norm)


def random_like(x: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """(count, *x.shape) of standard normal entries, drawn on the generator's device."""
    device = "cpu" if generator is None else generator.device
    drawn = torch.randn(count, *x.shape, generator=generator, device=device, dtype=torch.float32)
    return drawn.to(device=x.device, dtype=x.dtype)


def _by_lanczos(
    jacobian: Linearization, tol: float, max_iter: int, starts: Tensor
) -> tuple[Tensor, int, bool]:
    x, y = jacobian.x, jacobian.output
    # Below single precision only the products stay in x's dtype: a basis in it would be useless.
    work = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    pair = top_singular_pair(
        lambda v: jacobian.jvp(v.reshape(x.shape).to(x.dtype)).flatten().to(work),
        lambda u: jacobian.vjp(u.reshape(y.shape).to(y.dtype)).flatten().to(work),
        starts.flatten(1).to(work),
        tol=tol,
        max_iter=max_iter,
    )
    return pair.vector.reshape(x.shape).to(x.dtype), pair.iterations, pair.converged


def _by_power(
    jacobian: Linearization, norm: str, tol: float, max_iter: int, starts: Tensor
) -> tuple[Tensor, int, bool]:
    """The power method of `dual_steps`, all starts at once, in several rounds.

    Left alone, most starts would climb the same hill. So each round sends them to output groups
    that no round began with, those first that the last directions moved most. It is over when
    two rounds in a row bring nothing new, or when every group had its turn.
    """
    y = jacobian.jvps(input_step(starts, norm))
    begun = torch.zeros_like(group_norms(y[:1], norm)[0], dtype=torch.bool)
    best, direction, converged, spent, idle = -1.0, starts[0], False, len(starts), 0
    while idle < 2 and spent <= max_iter * len(starts) and not bool(begun.all()):
        sizes, mover = group_norms(y, norm).max(dim=0)
        count = min(len(starts), int((~begun).sum()))
        index = sizes.masked_fill(begun, -1).topk(count).indices
        begun[index] = True
        u = output_step(y[mover[index]], norm, index)[1]
        climb = _climb(jacobian, norm, input_step(jacobian.vjps(u), norm), None, tol, max_iter)
        y, spent, idle = climb.images, spent + climb.spent, idle + 1
        top = int(climb.gains.argmax())
        if float(climb.gains[top]) > best:
            idle = 0 if float(climb.gains[top]) > (1 + tol) * best else idle
            best, direction = float(climb.gains[top]), climb.directions[top]
            converged = climb.converged
    return direction, spent, converged


def _by_own_token(
    jacobian: Linearization, tol: float, max_iter: int, restarts: int, start: Tensor
) -> tuple[Tensor, int, bool]:
    """Three power steps for every token, then as many as it takes for the best of them."""
    tokens = groups(start, "self").shape[1]
    chunk = max(1, min(tokens, _STACK_ENTRIES // start.numel()))
    found, spent = [], 0
    for index in torch.arange(tokens, device=start.device).split(chunk):
        stack = input_step(start.expand(len(index), *start.shape[1:]), "self", index)
        climb = _climb(jacobian, "self", stack, index, tol, max_iter=3)
        own = groups(climb.directions, "self").sum(dim=1)  # all groups but one are zero
        found.append((climb.gains, climb.groups, own))
        spent += climb.spent
    gains, index, own = (torch.cat(parts) for parts in zip(*found, strict=True))
    best = gains.topk(min(restarts, len(gains))).indices
    stack = own[best, None].expand(-1, tokens, -1).reshape(len(best), *start.shape[1:])
    stack = one_group(stack, "self", index[best])
    climb = _climb(jacobian, "self", stack, index[best], tol, max_iter)
    return climb.directions[climb.gains.argmax()], spent + climb.spent, climb.converged


class _Climb(NamedTuple):
    """The directions e that were not dropped, their gains, images J e and own groups."""

    directions: Tensor
    gains: Tensor
    images: Tensor
    groups: Tensor | None
    spent: int
    converged: bool


def _climb(
    jacobian: Linearization,
    norm: str,
    e: Tensor,
    index: Tensor | None,
    tol: float,
    max_iter: int,
) -> _Climb:
    """Power steps from all directions e (R, *shape) at once until the gains stand still.

    A start that would not reach the best one in `_PATIENCE` steps of its last size is dropped.
    """
    last, spent = torch.zeros(len(e), dtype=e.dtype, device=e.device), 0
    for step in range(1, max_iter + 1):
        y = jacobian.jvps(e)
        spent += len(e)
        gain, u = output_step(y, norm, index)
        top = gain.max()
        # Small steps far from the top are common: stop well below the tolerance asked for.
        moving = gain - last > 0.01 * tol * top
        alive = gain + _PATIENCE * (gain - last) >= top
        converged = not bool((moving & alive).any())
        if converged or step == max_iter or not bool(torch.isfinite(gain).all()):
            break
        index, last = None if index is None else index[alive], gain[alive]
        e = input_step(jacobian.vjps(u[alive]), norm, index)
    return _Climb(e, gain, y, index, spent, converged)


def _attained(jacobian: Linearization, v: Tensor, norm: str) -> tuple[float, Tensor]:
    """The gain along v alone, in float64 but for the product itself, and v with norm one."""
    v = v / group_norms(v[None], norm).max().clamp_min(torch.finfo(v.dtype).tiny)
    y, v64 = jacobian.jvp(v)[None].double(), v[None].double()
    require_finite(y, "the Jacobian of fn at x")
    sizes = group_norms(y, norm)
    if norm == "self":
        sizes = sizes[:, group_norms(v64, norm).argmax()]
    length = float(group_norms(v64, norm).max())
    return (float(sizes.max()) / length if length > 0 else 0.0), v
