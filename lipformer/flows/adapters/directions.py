"""The two directions of an invertible block, for events of any leading batch shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_METHODS = ("forward", "inverse", "forward_and_log_det", "inverse_and_log_det")


@dataclass(frozen=True)
class Options:
    """What an adapter passes on to its block; None leaves the block's own default.

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

    def density(self) -> dict[str, Any]:
        """Those of forward_and_log_det."""
        return _given(method=self.method, generator=self.generator)

    def solve(self) -> dict[str, Any]:
        """Those of inverse."""
        return _given(tol=self.tol, max_iter=self.max_iter)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def check_block(block: nn.Module) -> nn.Module:
    """Returns the block; raises unless it has the four methods of an invertible module."""
    missing = [name for name in _METHODS if not callable(getattr(block, name, None))]
    if not isinstance(block, nn.Module) or missing:
        raise TypeError(
            f"an adapter takes a module with the methods {', '.join(_METHODS)}, such as "
            f"InvertibleResidual or AttentionFlow, got {type(block).__name__}"
        )
    return block


def noise_of(block: Any, data: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Data (*, T, D) to noise (*, T, D), and log|det d noise / d data| (*)."""
    noise, log_det = block.forward_and_log_det(_events(data), **options.density())
    return noise.reshape(data.shape), log_det.reshape(data.shape[:-2])


def data_and_log_det(block: Any, noise: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Noise (*, T, D) to data (*, T, D), and log|det d data / d noise| (*)."""
    arguments = {**options.density(), **options.solve()}
    data, log_det = block.inverse_and_log_det(_events(noise), **arguments)
    return data.reshape(noise.shape), log_det.reshape(noise.shape[:-2])


def data_of(block: Any, noise: Tensor, options: Options) -> Tensor:
    """Noise (*, T, D) to data (*, T, D)."""
    return block.inverse(_events(noise), **options.solve()).reshape(noise.shape)


def _events(x: Tensor) -> Tensor:
    """(*, T, D) -> (B, T, D)."""
    if x.ndim < 2:
        raise ValueError(f"events have shape (*, T, D), got {tuple(x.shape)}")
    return x.reshape(-1, *x.shape[-2:])
