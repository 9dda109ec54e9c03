"""Numbers of a module as tensors on its device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lipformer.functional.tracing import tracing


class Constants:
    """Tuples of numbers as tensors, copied to a device once and not in each pass.

    They are found again by the numbers themselves, so that they cannot be stale. Not buffers:
    ``module.half()`` would round those, and ``to_empty`` would lose them.
    """

    _MOST = 16

    def __init__(self) -> None:
        self._held: dict[Any, Tensor] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles begin empty.
        return Constants, ()

    def __call__(
        self, values: tuple[Any, ...], device: torch.device, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """A tuple of numbers, or of tuples of numbers of one length, as a tensor of that shape."""
        if tracing():
            # Filled, not copied: a compiled graph with a copy from the host cannot be a CUDA graph.
            if isinstance(values[0], tuple):
                return torch.stack([self(row, device, dtype) for row in values])
            return torch.stack([torch.full((), v, dtype=dtype, device=device) for v in values])
        key = values, device, dtype
        if key in self._held:
            return self._held[key]
        with torch.inference_mode(False):
            made = torch.tensor(values, dtype=dtype, device=device)
        if type(made) is Tensor:  # and not a stand-in of FakeTensorMode
            if len(self._held) == self._MOST:
                self._held.clear()
            self._held[key] = made
        return made
