"""A search over inputs for the largest local gain: a lower estimate of a Lipschitz constant.

First the search itself, then where it starts: token configurations where attention gains most, and the
steepest point of a segment, which needs no derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipformer.estimates.dual_steps import group_norms, input_step, one_group, output_step
from lipformer.estimates.estimate import estimate_lipschitz, random_like
from lipformer.estimates.jacobian_products import Linearization, Map, detached_output, independent_calls

_SCAN_ROUNDS = 4  # power steps for each size of each start
_ASCENT_ROUNDS = 2  # power steps, from the last direction on, for each step of the ascent
_FINALISTS = 3  # inputs that get a converged estimate in the end


@dataclass(frozen=True, eq=False)
class Attack:
    """The input with the largest local gain that a search found: a lower estimate.

    Attributes:
        value: The local gain at `input`, as `estimate_lipschitz` gives it.
        input: The input, of x0's shape.
        direction: The perturbation of `input` that is magnified by `value`.
        history: The largest gain found so far, after the scan and after each step.
        start: The family of starts the input came from.
        norm: The norm of input and output.
    """

    value: float
    input: Tensor
    direction: Tensor
    history: tuple[float, ...]
    start: str
    norm: str


@torch.inference_mode(False)
def attack_lipschitz(
    fn: Callable[[Tensor], Any],
    x0: Tensor,
    *,
    norm: str = "l2",
    steps: int = 60,
    restarts: int = 16,
    lr: float = 0.1,
    generator: torch.Generator | None = None,
) -> Attack:
    r"""Searches for the input with the largest local gain of fn: a lower estimate of its constant.

    Gradient ascent (Adam) on x of |J(x) v|, J = fn'(x), the direction v refreshed by power steps
    (`dual_steps`) in each step, from several starts at once:

        x0           the given input
        line         half the tokens at +r, half at -r, one in the middle: the extreme of
                     docs/theory, Theorems D and E
        random       normal entries
        star         copies of one point, the rest in orthogonal directions from it
        cluster      tokens gathered at a few points
        segment      the steepest point between two random inputs (`steepest_point`)
        x0 rescaled  the given input about its centre

    All but the first are first scanned over sizes, from 1e-2 to 1e3 times that of x0 and as far
    around one, and climb from the best. The result is never below the estimate at x0. Inputs where
    fn or its Jacobian is not finite are skipped.

    Args:
        fn: Maps x0 to a tensor, or to a tuple whose first element is one. All starts go through
            it as one batch where it treats a batch as independent samples (this is checked
            against single calls), else through `torch.vmap`, else one by one.
        x0: (*, N, D), floating point; sets shape, dtype, device, centre and size of the starts.
        norm: "l2", "token", "self" or "linf", as in `estimate_lipschitz`.
        steps: Number of ascent steps.
        restarts: Number of starts, x0 included.
        lr: Step size, relative to the size of each start.
        generator: Source of all draws; the result is a function of it.

    Returns:
        An `Attack`.

    Example:
        >>> import torch
        >>> attack = attack_lipschitz(torch.sin, torch.ones(1, 1), steps=50)
        >>> round(attack.value, 3)
        1.0
    """
    x0 = x0.detach()
    best, found, name = estimate_lipschitz(fn, x0, norm=norm, generator=generator), x0, "x0"
    if not Linearization(fn, x0).twice_differentiable:
        raise RuntimeError(
            "attack_lipschitz needs an fn that can be differentiated twice (estimate_lipschitz "
            "also takes one with forward mode only)"
        )
    centre = x0.reshape(-1, x0.shape[-1]).mean(dim=0)
    size = float((x0 - centre).square().mean().sqrt()) or 1.0
    starts = draw_starts((x0 - centre) / size, restarts, generator)
    fresh = random_like(x0, restarts, generator)
    radii = _radii(size)
    probes = [centre + radii[k % len(radii)] * starts.shapes[k] for k in range(restarts)]
    many = independent_calls(fn, torch.stack(probes))
    search = _Search(many, norm, starts.focus, fresh)
    steep = [k for k in range(restarts) if starts.names[k] == "segment"]
    if steep:
        a, b = (torch.cat([centre + r * t[steep] for r in radii]) for t in (starts.shapes, fresh))
        steepest = steepest_point(many, a, b, norm).split(len(steep))
    for k, radius in enumerate(radii):
        x = centre + radius * starts.shapes
        x[0] = x0  # the one start that keeps its size
        if steep:
            x[steep] = steepest[k]
        search.look(x, search.fresh, _SCAN_ROUNDS, focused=True)
    history = search.climb(centre, steps, lr)
    for k in search.best_gain.topk(min(_FINALISTS, restarts)).indices.tolist():
        if not math.isfinite(search.best_gain[k]):
            continue
        try:
            estimate = estimate_lipschitz(fn, search.best_x[k], norm=norm, generator=generator)
        except ValueError:  # fn refuses this input, or is not finite there in a single call
            continue
        if estimate.value > best.value:
            best, found, name = estimate, search.best_x[k], starts.names[k]
    return Attack(best.value, found, best.direction, history, name, norm)


def _radii(size: float) -> list[float]:
    """1e-2 to 1e3 times `size`, and as far around one: a third of a decade apart, 31 at most."""
    low, high = math.log10(1e-2 * min(size, 1.0)), math.log10(1e3 * max(size, 1.0))
    count = min(31, round(3 * (high - low)) + 1)
    return [10 ** (low + (high - low) * k / (count - 1)) for k in range(count)]


class _Search:
    """R inputs, the directions that are magnified most at each, and the best seen of each.

    Attributes:
        fresh: (R, *shape), directions to begin with.
        best_gain: (R,).
        best_x, best_v: (R, *shape), an input and a direction with that gain.
    """

    def __init__(self, fn: Map, norm: str, focus: Tensor, directions: Tensor) -> None:
        self._fn, self._norm, self._focus = fn, norm, focus
        self._own = focus if norm == "self" else None
        self.fresh = input_step(directions, norm, self._own)
        self.best_gain = torch.full_like(directions.flatten(1)[:, 0], -math.inf)
        self.best_x, self.best_v = torch.zeros_like(directions), self.fresh

    def look(
        self, x: Tensor, v: Tensor, rounds: int, focused: bool = False
    ) -> tuple[Linearization, Tensor, Tensor]:
        """Power steps at the inputs x from the directions v; keeps what is better than before.

        Args:
            x: (R, *shape).
            v: (R, *shape), of norm one.
            rounds: Number of power steps.
            focused: Begin with what the focus token does, where outputs have the tokens of x:
                the start was built around it, and a greedy choice might never look there.

        Returns:
            The linearisation at x and the pair u, v, with |J v| = <u, J v> the gains.
        """
        jacobian = Linearization(self._fn, x, verify=False)
        following = v
        for k in range(rounds):
            v = following
            y = jacobian.jvp(v)
            if focused and k == 0 and self._norm != "l2" and y.shape[:-1] == x.shape[:-1]:
                y = one_group(y, "token", self._focus)
            gain, u = output_step(y, self._norm, self._own)
            following = input_step(jacobian.vjp(u), self._norm, self._own)
        better = torch.isfinite(gain) & (gain > self.best_gain)
        self.best_gain = torch.where(better, gain, self.best_gain)
        self.best_x = torch.where(_wide(better, x), x, self.best_x)
        self.best_v = torch.where(_wide(better, v), v, self.best_v)
        return jacobian, u, v

    def climb(self, centre: Tensor, steps: int, lr: float) -> tuple[float, ...]:
        """Adam from the best inputs; the largest gain before and after each step."""
        x, v = self.best_x, self.best_v
        size = (x - centre).flatten(1).square().mean(dim=1).sqrt()
        first, second = torch.zeros_like(x), torch.zeros_like(x)
        history = []
        tiny = torch.finfo(x.dtype).tiny
        for step in range(1, steps + 1):
            jacobian, u, v = self.look(x, v, _ASCENT_ROUNDS)
            history.append(float(self.best_gain.max()))
            gradient = jacobian.ascent(u, v)
            gradient = gradient / _wide(gradient.flatten(1).abs().amax(dim=1) + tiny, x)
            usable = _wide(torch.isfinite(gradient).flatten(1).all(dim=1), x)
            gradient = torch.where(usable, gradient, torch.zeros_like(x))
            first = 0.9 * first + 0.1 * gradient
            second = 0.99 * second + 0.01 * gradient.square()
            move = (first / (1 - 0.9**step)) / ((second / (1 - 0.99**step)).sqrt() + 1e-8)
            # Down to a tenth of the first step, so that the last ones settle.
            pace = lr * (1 - 0.9 * (step - 1) / steps)
            x = torch.where(usable, x + pace * _wide(size, x) * move, self.best_x)
            v = torch.where(usable, v, self.best_v)
        self.look(x, v, _SCAN_ROUNDS)
        return (*history, float(self.best_gain.max()))


def _wide(per_start: Tensor, like: Tensor) -> Tensor:
    """(R,) -> (R, 1, ..., 1), to go with a stack (R, *shape)."""
    return per_start.reshape(-1, *[1] * (like.ndim - 1))


@dataclass(frozen=True, eq=False)
class Starts:
    """R starting points around one centre, still without a size; the first is the input itself.

    Attributes:
        shapes: (R, *shape), offsets from the centre, of size one.
        focus: (R,), the token (numbered over all dimensions but the last) that "self" watches.
        names: The family of each.
    """

    shapes: Tensor
    focus: Tensor
    names: tuple[str, ...]


def draw_starts(offset: Tensor, count: int, generator: torch.Generator | None) -> Starts:
    """The input itself, then the families in turn: `count` starts of the shape of `offset`.

    Args:
        offset: (*, N, D), the input's own offsets from its centre, of size one.
        count: Number of starts.
        generator: Source of all draws.
    """
    families: tuple[tuple[str, Callable[..., tuple[Tensor, int]]], ...] = (
        ("line", _line),
        ("random", _random),
        ("star", _star),
        ("cluster", _cluster),
        ("segment", _random),
    )
    d = offset.shape[-1]
    tokens = offset.numel() // d
    # (N, 1, D) is one sequence with the batch second: its tokens lie along the first dimension.
    n = offset.shape[-2] if offset.ndim > 1 and offset.shape[-2] > 1 else tokens
    shapes, focus, names = [offset], [tokens - 1], ["x0"]
    for k in range(count - 1):
        if k % (len(families) + 1) == len(families):
            shapes.append(offset)
            focus.append(_integer(tokens, generator))
            names.append("x0 rescaled")
            continue
        name, family = families[k % (len(families) + 1)]
        drawn = [family(n, d, k, generator) for _ in range(tokens // n)]
        shape = torch.cat([one for one, _ in drawn]).reshape(offset.shape)
        shapes.append(shape.to(offset))
        focus.append(drawn[0][1])
        names.append(name)
    return Starts(torch.stack(shapes), torch.tensor(focus, device=offset.device), tuple(names))


def _line(n: int, d: int, k: int, generator: torch.Generator | None) -> tuple[Tensor, int]:
    """Half the tokens at +1 and half at -1 on a line, one in the middle (Theorems D and E).

    The one in the middle comes last in the first such start, where a causal mask lets it see
    all others, and anywhere in later ones.
    """
    axis = _normal((d,), generator)
    axis = axis / axis.norm()
    middle = n - 1 if k == 0 else _integer(n, generator)
    sign = torch.ones(n)
    sign[1::2] = -1
    sign[middle + 1 :] *= -1  # the alternation goes on behind the middle
    sign[middle] = 0
    return sign[:, None] * axis, middle


def _star(n: int, d: int, k: int, generator: torch.Generator | None) -> tuple[Tensor, int]:
    """About sqrt(n) copies of one point, the rest one step from it in orthogonal directions.

    1/kappa copies and kappa^-2 arms of kernel value kappa make ||P|| of the order N^(1/4).
    """
    frame = torch.linalg.qr(_normal((d, d), generator)).Q
    arms = n - max(1, round(math.sqrt(n)))
    number = torch.arange(arms)
    opposite = 1.0 - 2.0 * ((number // d) % 2)
    points = torch.zeros(n, d)
    places = torch.randperm(n, generator=generator, device=_device(generator)).cpu()
    points[places[:arms]] = opposite[:, None] * frame[number % d]
    return points, int(places[-1])


def _cluster(n: int, d: int, k: int, generator: torch.Generator | None) -> tuple[Tensor, int]:
    """Tokens gathered at two, three or four points, a little apart so that they may part."""
    centres = _normal((2 + _integer(3, generator), d), generator)
    member = torch.randint(len(centres), (n,), generator=generator, device=_device(generator)).cpu()
    return centres[member] + 1e-2 * _normal((n, d), generator), _integer(n, generator)


def _random(n: int, d: int, k: int, generator: torch.Generator | None) -> tuple[Tensor, int]:
    """Independent normal entries."""
    return _normal((n, d), generator), _integer(n, generator)


def _device(generator: torch.Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device


def _normal(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, device=_device(generator)).cpu()


def _integer(below: int, generator: torch.Generator | None) -> int:
    return int(torch.randint(below, (), generator=generator, device=_device(generator)))


def steepest_point(fn: Map, a: Tensor, b: Tensor, norm: str, rounds: int = 40) -> Tensor:
    """The midpoint of the steepest part, found by halving, of each segment from a to b.

    Of the two halves of a segment the one with the larger |fn(end) - fn(end')| / |end - end'|
    is kept. By the triangle inequality that quotient never falls, so it ends at a point whose
    local gain is at least the quotient of the whole. Where fn almost jumps (a softmax between
    two far keys) derivatives vanish on either side and this still finds the place.

    Args:
        fn: (R, *shape) -> (R, *output shape), each input for itself.
        a: (R, *shape).
        b: (R, *shape).
        norm: The norm of the quotient: "l2", "token", "self" (taken as "token") or "linf".
        rounds: Number of halvings.

    Returns:
        (R, *shape).
    """
    f_a, f_b = detached_output(fn, a), detached_output(fn, b)
    for _ in range(rounds):
        middle = (a + b) / 2
        f_middle = detached_output(fn, middle)
        rise_a = group_norms(f_middle - f_a, norm).amax(dim=1)
        rise_b = group_norms(f_b - f_middle, norm).amax(dim=1)
        first = rise_a >= rise_b
        wide = first.reshape(-1, *[1] * (a.ndim - 1))
        tall = first.reshape(-1, *[1] * (f_a.ndim - 1))
        a, b = torch.where(wide, a, middle), torch.where(wide, middle, b)
        f_a, f_b = torch.where(tall, f_a, f_middle), torch.where(tall, f_middle, f_b)
    return (a + b) / 2
