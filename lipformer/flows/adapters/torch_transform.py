"""An invertible block as a transform of torch.distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Transform, constraints

from lipformer.flows.adapters.directions import Adapted, Options


class _Pair(NamedTuple):
    """Noise, its data, log|det d data / d noise| if known, and copies of what they depend on."""

    noise: Tensor
    data: Tensor
    log_det: Tensor | None
    modes: list[object]
    tensors: list[Tensor]


class NoiseToData(Adapted):
    """The methods of a transform from noise to data, for torch's Transform and for Pyro's module.

    The density needs data to noise: it gives noise and log-determinant in one pass, which is kept, so
    that log_abs_det_jacobian does not run the block again. It is used for the same tensors, unchanged,
    with the same weights and modes, once: else the block runs again. With a cache (``cache_size=1``)
    the last pair is kept by the same rule, in both directions, and used as often as asked for.
    """

    single = False
    bijective = True
    sign = None  # of several coordinates there is none

    _kept: _Pair | None = None
    _cache_size: int

    @constraints.dependent_property(is_discrete=False)
    def domain(self) -> Any:
        """Events (T, D) of real numbers, or vectors."""
        return constraints.independent(constraints.real, self.events.ndim)

    codomain = domain

    def forward_shape(self, shape: Sequence[int]) -> Sequence[int]:
        """The shape itself, if it is one of events: torch asks for that of a base here."""
        self.events.check(shape)
        return shape

    inverse_shape = forward_shape

    def __call__(self, x: Tensor) -> Tensor:
        """Noise (*, *event) to data of the same shape."""
        kept = self._current(noise=x) if self._cache_size else None
        if kept is not None:
            return kept.data
        data = self._call(x)
        if self._cache_size:
            self._keep(x, data, None)
        return data

    def _inv_call(self, y: Tensor) -> Tensor:
        kept = self._current(data=y) if self._cache_size else None
        return self._inverse(y) if kept is None else kept.noise

    def _call(self, x: Tensor) -> Tensor:
        return self.data_of(x)

    def _inverse(self, y: Tensor) -> Tensor:
        noise, log_det = self._from_data(y)
        self._keep(noise, y, -log_det)
        return noise

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """log|det dy/dx| (*), x being noise and y data of shape (*, *event)."""
        kept = self._current(noise=x, data=y)
        if not self._cache_size:
            self._kept = None
        if kept is not None and kept.log_det is not None:
            return kept.log_det
        # The log-determinant is a function of the data: no inverse is needed.
        return -self._from_data(y)[1]

    def _keep(self, noise: Tensor, data: Tensor, log_det: Tensor | None) -> None:
        modes, tensors = self._state(noise, data)
        self._kept = _Pair(noise, data, log_det, modes, [t.clone() for t in tensors])

    def _current(self, noise: Tensor | None = None, data: Tensor | None = None) -> _Pair | None:
        """The pair that was kept, if it is that of these tensors and nothing has changed since."""
        kept = self._kept
        if kept is None or (noise is not None and noise is not kept.noise):
            return None
        if data is not None and data is not kept.data:
            return None
        modes, tensors = self._state(kept.noise, kept.data)
        same = modes == kept.modes and len(tensors) == len(kept.tensors)
        return kept if same and all(map(_equal, tensors, kept.tensors)) else None

    def _state(self, noise: Tensor, data: Tensor) -> tuple[list[object], list[Tensor]]:
        """What a pair depends on: settings, and the numbers of the pair itself, weights and buffers."""
        given = () if self.options.context is None else (self.options.context,)
        tensors = (noise, data, *given, *self.block.parameters(), *self.block.buffers())
        modes = [torch.is_grad_enabled(), repr(self.block), *(m.training for m in self.block.modules())]
        return modes, [t.detach() for t in tensors]

    def _from_data(self, data: Tensor) -> tuple[Tensor, Tensor]:
        self.events.check_data(data.shape)
        return self.noise_and_log_det(data)

    def with_cache(self, cache_size: int = 1) -> Any:
        """The same transform with a cache of the last pair, or without."""
        if cache_size == self._cache_size:
            return self
        return type(self)(self.block, self.options, cache_size=cache_size)

    def __getstate__(self) -> dict[str, Any]:
        # Tensors of the last pass have a graph, which cannot be copied.
        parent: Any = super()
        return {**parent.__getstate__(), "_kept": None}


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


class BlockTransform(NoiseToData, Transform):  # type: ignore[misc]  # torch's are of wider types
    """An invertible block as torch's Transform; call: noise (*, *event) to data of the same shape."""


def to_torch_transform(block: nn.Module, **options: Any) -> BlockTransform:
    """Wraps an invertible block as a transform from noise to data, for TransformedDistribution.

    Args:
        block: a module with forward, inverse, forward_and_log_det and inverse_and_log_det.
        options: method and generator of log-determinants, tol and max_iter of the inverse; the default
            is the block's. vectors="token" if events are vectors (D,), each one token, or "tokens" if
            each of their features is a token. event_shape, (T, D) or (D,), where a size of it is 1 that
            the block does not know: else that is refused, as it fits a base of any size. context,
            (C,) or (*, C), of a block that takes one.

    Example:
        >>> from torch.distributions import Independent, Normal, TransformedDistribution
        >>> from lipformer.flows import ActNorm
        >>> noise = Independent(Normal(torch.zeros(5, 2), 1.0), 2)
        >>> data = TransformedDistribution(noise, [to_torch_transform(ActNorm(2))])
        >>> data.log_prob(data.sample((3,))).shape
        torch.Size([3])
    """
    return BlockTransform(block, Options(**options))
