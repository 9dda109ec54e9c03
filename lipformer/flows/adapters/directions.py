"""An invertible block in the hands of another library: its two directions, and the options of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipformer.flows.adapters.events import Events
from lipformer.flows.composition import check_block, run


@dataclass(frozen=True)
class Options:
    """What every adapter takes beside its block; None leaves the block's own default.

    Attributes:
        method: how log-determinants are computed.
        generator: of random log-determinants.
        tol: tolerance of the inverse.
        max_iter: limit of the inverse.
        vectors: what vectors (D,) are, "token" or "tokens"; None for events (T, D). See :class:`Events`.
        event_shape: of the host's events; needed only where a size is 1 that the block does not know.
    """

    method: str | None = None
    generator: torch.Generator | None = None
    tol: float | None = None
    max_iter: int | None = None
    vectors: str | None = None
    event_shape: Sequence[int] | None = None

    def of_block(self) -> dict[str, Any]:
        """Those that are passed on to the block's methods."""
        names = ("method", "generator", "tol", "max_iter")
        return {name: getattr(self, name) for name in names}


class Adapted:
    """What the hosts' classes share: they hold a block and know the shape of its events.

    Args:
        block: a module with forward, inverse, forward_and_log_det and inverse_and_log_det.
        options: of its methods, and of its events.
        arguments: of the host's own class.
    """

    # Whether the host knows batches (B, *event) alone.
    single = True

    def __init__(self, block: nn.Module, options: Options, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self.block = check_block(block)
        self.options = options
        self.events = Events(block, options.vectors, options.event_shape, single=self.single)

    def noise_and_log_det(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Data (*, *event) to noise of the same shape, and log|det d noise / d data| (*)."""
        return self._both("forward_and_log_det", data)

    def data_and_log_det(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Noise (*, *event) to data of the same shape, and log|det d data / d noise| (*)."""
        return self._both("inverse_and_log_det", noise)

    def noise_of(self, data: Tensor) -> Tensor:
        """Data (*, *event) to noise of the same shape."""
        return self._run("forward", data).reshape(data.shape)

    def data_of(self, noise: Tensor) -> Tensor:
        """Noise (*, *event) to data of the same shape."""
        return self._run("inverse", noise).reshape(noise.shape)

    def _both(self, direction: str, x: Tensor) -> tuple[Tensor, Tensor]:
        out, log_det = self._run(direction, x)
        return out.reshape(x.shape), log_det.reshape(x.shape[: -self.events.ndim])

    def _run(self, direction: str, x: Tensor) -> Any:
        return run(self.block, direction, self.events.tokens(x), None, **self.options.of_block())
