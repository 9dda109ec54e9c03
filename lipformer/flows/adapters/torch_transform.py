"""An invertible block as a transform of torch.distributions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Transform, constraints

from lipformer.flows.adapters.directions import Adapted, Options


class NoiseToData(Adapted):
    """The methods of a transform from noise to data, for torch's Transform and for Pyro's module.

    The density needs data to noise: it gives noise and log-determinant in one pass, which is kept, so
    that log_abs_det_jacobian does not run the block again. It is used for the same tensors, unchanged,
    with the same weights and grad mode, once: else the block runs again.
    """

    domain = constraints.independent(constraints.real, 2)
    codomain = constraints.independent(constraints.real, 2)
    bijective = True
    sign = None  # of several coordinates there is none

    _kept: tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]] | None = None

    def _call(self, x: Tensor) -> Tensor:
        return self.data_of(x)

    def _inverse(self, y: Tensor) -> Tensor:
        noise, log_det = self.noise_and_log_det(y)
        self._kept = (noise, y, -log_det, self._moment(y))
        return noise

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """log|det dy/dx| (*), x being noise and y data of shape (*, T, D)."""
        kept, self._kept = self._kept, None
        if kept is not None and kept[0] is x and kept[1] is y:
            now = zip(kept[3], self._moment(y), strict=True)
            if all(torch.equal(before, after) for before, after in now):
                return kept[2]
        # The log-determinant is a function of the data: no inverse is needed.
        return -self.noise_and_log_det(y)[1]

    def _moment(self, y: Tensor) -> tuple[Tensor, ...]:
        """What a pair depends on besides its tensors' identity, by value."""
        tensors = (*self.block.parameters(), *self.block.buffers())
        sizes = [t.detach().double().norm() for t in tensors]
        grad = torch.tensor(torch.is_grad_enabled())
        return grad, y.detach().clone(), torch.stack(sizes) if sizes else grad

    def with_cache(self, cache_size: int = 1) -> Any:
        """The same transform with torch's own cache of the last pair."""
        if cache_size == self._cache_size:  # type: ignore[attr-defined]  # of torch's Transform
            return self
        return type(self)(self.block, self.options, cache_size=cache_size)

    def __getstate__(self) -> dict[str, Any]:
        # Tensors of the last pass have a graph, which cannot be copied.
        parent: Any = super()
        state = {**parent.__getstate__(), "_kept": None}
        if "_cached_x_y" in state:
            state["_cached_x_y"] = None, None
        return state


class BlockTransform(NoiseToData, Transform):  # type: ignore[misc]  # torch's are of wider types
    """An invertible block as torch's Transform; call: noise (*, T, D) to data (*, T, D)."""


def to_torch_transform(block: nn.Module, **options: Any) -> BlockTransform:
    """An invertible block as a transform from noise to data, for TransformedDistribution.

    Args:
        block: a module with forward, inverse, forward_and_log_det and inverse_and_log_det.
        options: method and generator of log-determinants, tol and max_iter of the inverse; the default
            is the block's.

    Example:
        >>> from torch.distributions import Independent, Normal, TransformedDistribution
        >>> from lipformer.flows import ActNorm
        >>> noise = Independent(Normal(torch.zeros(5, 2), 1.0), 2)
        >>> data = TransformedDistribution(noise, [to_torch_transform(ActNorm(2))])
        >>> data.log_prob(data.sample((3,))).shape
        torch.Size([3])
    """
    return BlockTransform(block, Options(**options))
