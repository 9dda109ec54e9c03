"""Starting points for a search over inputs: token configurations where attention gains most."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


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
