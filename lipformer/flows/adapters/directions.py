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
        context: of a block that takes one, for all events; hosts that know conditions give theirs.
    """

    method: str | None = None
    generator: torch.Generator | None = None
    tol: float | None = None
    max_iter: int | None = None
    vectors: str | None = None
    event_shape: Sequence[int] | None = None
    context: Tensor | None = None

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

    def noise_and_log_det(self, data: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Data (*, *event) to noise of the same shape, and log|det d noise / d data| (*)."""
        noise, log_det = self._run("forward_and_log_det", data, context)
        return noise, log_det

    def data_and_log_det(self, noise: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Noise (*, *event) to data of the same shape, and log|det d data / d noise| (*)."""
        data, log_det = self._run("inverse_and_log_det", noise, context)
        return data, log_det

    def noise_of(self, data: Tensor, context: Tensor | None = None) -> Tensor:
        """Data (*, *event) to noise of the same shape."""
        return self._run("forward", data, context)[0]

    def data_of(self, noise: Tensor, context: Tensor | None = None) -> Tensor:
        """Noise (*, *event) to data of the same shape."""
        return self._run("inverse", noise, context)[0]

    def condition_of(self, context: Tensor | None) -> Tensor | None:
        """The host's context, else that of the options; raises if the block takes none."""
        context = self.options.context if context is None else context
        if context is not None and getattr(self.block, "context_dim", None) is None:
            raise ValueError(
                f"the block takes no condition (context, c), but got one of {tuple(context.shape)}"
            )
        return context

    def _run(self, direction: str, x: Tensor, context: Tensor | None) -> tuple[Tensor, ...]:
        context = self.condition_of(context)
        if context is not None and not self.single:
            # Contexts (*, C) with events: each batch shape is made the other's.
            batch = torch.broadcast_shapes(x.shape[: -self.events.ndim], context.shape[:-1])
            x = x.expand(*batch, *x.shape[-self.events.ndim :])
            context = context.expand(*batch, -1).reshape(-1, context.shape[-1])
        given = self.options.of_block()
        found = run(self.block, direction, self.events.tokens(x), None, context, **given)
        out, *log_det = found if isinstance(found, tuple) else (found,)
        return out.reshape(x.shape), *(part.reshape(x.shape[: -self.events.ndim]) for part in log_det)
