"""Explicit caching of values derived from weights: for solves, generation, export, and one pass.

Outside a freeze everything is recomputed from the raw weights in each forward pass, so that no step,
load, copy or average can leave a stale constant behind. A model whose layers are many may freeze them
for the length of its own forward pass, so that the spectral norms of all are computed together.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lipformer.layers.layer import Layer

_V = TypeVar("_V")


class Freezable(Layer):
    """A module with a value derived from its weights, a tensor or several, kept only inside a freeze."""

    def __init__(self) -> None:
        super().__init__()
        self._freezing = False
        self._kept: Any = None
        self._kept_of: tuple[Tensor, ...] = ()
        self._kept_tracked = False

    def __getstate__(self) -> dict[str, Any]:
        # A copy made inside a freeze is not frozen: it would never thaw.
        return {**self.__dict__, "_freezing": False, "_kept": None, "_kept_of": ()}

    def derived(self, compute: Callable[[], _V], of: tuple[Tensor, ...] = ()) -> _V:
        """The derived value, computed anew unless frozen.

        Args:
            compute: computes it.
            of: the weights it is derived from; from others it is computed anew.
        """
        if not self._freezing:
            return compute()
        # What was kept without a graph must not silence gradients that are wanted later.
        tracked = torch.is_grad_enabled()
        kept: _V | None = self._kept
        same = len(of) == len(self._kept_of) and all(map(operator.is_, of, self._kept_of))
        if kept is None or not same or (tracked and not self._kept_tracked):
            kept = compute()
            self._kept, self._kept_of, self._kept_tracked = kept, of, tracked
        return kept

    def freeze(self, value: Any = None, of: tuple[Tensor, ...] = ()) -> None:
        """Keeps the derived value from now on: ``value``, or what the next look computes."""
        self._freezing, self._kept, self._kept_of = True, value, of
        self._kept_tracked = torch.is_grad_enabled()

    def thaw(self) -> None:
        """Forgets it."""
        self._freezing, self._kept, self._kept_of = False, None, ()


@contextlib.contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Context in which normalised weights and bounds are computed once.

    Weights, settings and parts must not change inside. Freezes may be nested.

    Example:
        >>> import lipformer as lf
        >>> layer = lf.SpectralLinear(4, 4)
        >>> with frozen(layer):
        ...     layer.weight is layer.weight
        True
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"frozen takes a torch.nn.Module, got {type(module).__name__}")
    parts = [m for m in module.modules() if isinstance(m, Freezable) and not m._freezing]
    for part in parts:
        part.freeze()
    try:
        yield
    finally:
        for part in parts:
            part.thaw()
