"""One call of a function for many inputs of one shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lipformer.certificate._jacobian_products import detached_output, output_tensor

Map = Callable[[Tensor], Tensor]


def independent_calls(fn: Callable[[Tensor], Any], probes: Tensor) -> Map:
    """A map (R, *shape) -> (R, *output shape) that applies fn to each of R inputs.

    The quickest of three ways that reproduces single calls on `probes`: the inputs as one larger
    batch; `torch.vmap`; a loop. The check is needed: a batch may be refused (a mask made for one
    batch size), and it may be taken for something else (a layer with batch_first=False reads a
    stack of (N, D) inputs as sequences across them).

    Args:
        fn: Maps a tensor of `shape` to a tensor or a tuple whose first element is one.
        probes: (P, *shape), different inputs of the sizes that will be used.
    """

    def loop(x: Tensor) -> Tensor:
        return torch.stack([output_tensor(fn, one) for one in x])

    def batch(x: Tensor) -> Tensor:
        if x.ndim <= 3:
            return output_tensor(fn, x)
        return output_tensor(fn, x.flatten(0, 1)).unflatten(0, x.shape[:2])

    def vmapped(x: Tensor) -> Tensor:
        return torch.vmap(lambda one: output_tensor(fn, one), randomness="different")(x)

    expected = detached_output(loop, probes)
    for way in (batch, vmapped):
        if _same(way, probes, expected):
            return way
    return loop


def _same(way: Map, probes: Tensor, expected: Tensor) -> bool:
    try:
        output = detached_output(way, probes)
    except Exception:  # whatever fn does with a shape it was not written for, it is no error here
        return False
    if output.shape != expected.shape:
        return False
    finite = torch.isfinite(expected).flatten(1).all(dim=1)
    error = (output - expected)[finite].abs().flatten(1)
    size = expected[finite].abs().flatten(1)
    if error.numel() == 0:
        return False
    tolerance = torch.finfo(expected.dtype).eps ** 0.5
    return bool((error.amax(dim=1) <= tolerance * size.amax(dim=1)).all())
