"""An invertible block in the hands of another library: its two directions, and the options of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipformer.flows.composition import check_block, run


@dataclass(frozen=True)
class Options:
    """What every adapter passes on to its block; None leaves the block's own default.

    Attributes:
        method: how log-determinants are computed.
        generator: of random log-determinants.
        tol: tolerance of the inverse.
        max_iter: limit of the inverse.
    """

    method: str | None = None
    generator: torch.Generator | None = None
    tol: float | None = None
    max_iter: int | None = None


def two_readings(x: Tensor) -> str:
    """What is wrong with a tensor (N, D) that has no batch: it may be one event, or N samples."""
    n, dim = x.shape
    return (
        f"events have shape (*, T, D), got {(n, dim)}: give (1, {n}, {dim}) for one event of {n} "
        f"tokens, ({n}, 1, {dim}) for {n} events of one token"
    )


class Adapted:
    """What the hosts' classes share: they hold a block, for events of any leading batch shape.

    Args:
        block: a module with forward, inverse, forward_and_log_det and inverse_and_log_det.
        options: of its methods.
        arguments: of the host's own class.
    """

    def __init__(self, block: nn.Module, options: Options, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self.block = check_block(block)
        self.options = options

    def noise_and_log_det(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Data (*, T, D) to noise (*, T, D), and log|det d noise / d data| (*)."""
        noise, log_det = self._run("forward_and_log_det", data)
        return noise.reshape(data.shape), log_det.reshape(data.shape[:-2])

    def data_and_log_det(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Noise (*, T, D) to data (*, T, D), and log|det d data / d noise| (*)."""
        data, log_det = self._run("inverse_and_log_det", noise)
        return data.reshape(noise.shape), log_det.reshape(noise.shape[:-2])

    def data_of(self, noise: Tensor) -> Tensor:
        """Noise (*, T, D) to data (*, T, D)."""
        return self._run("inverse", noise).reshape(noise.shape)

    def _run(self, direction: str, x: Tensor) -> Any:
        if x.ndim < 2:
            raise ValueError(f"events have shape (*, T, D), got {tuple(x.shape)}")
        return run(self.block, direction, x.reshape(-1, *x.shape[-2:]), None, **vars(self.options))
