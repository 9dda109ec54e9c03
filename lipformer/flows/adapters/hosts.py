"""Invertible blocks as modules of normflows, nflows, FrEIA, zuko and Pyro.

Classes that inherit from another library's are made when they are first asked for, once, and this
module hands them out by name (``__getattr__``), so that pickle finds them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipformer.flows.adapters.directions import (
    Options,
    check_block,
    data_and_log_det,
    data_of,
    noise_of,
)
from lipformer.flows.adapters.torch_transform import BlockTransform, NoiseToData


def _host(name: str, package: str) -> Any:
    """Imports a library of the extra ``flows``."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"this adapter needs {package}, which is not installed ({error}): "
            f"pip install 'lipformer[flows]' or pip install {package}"
        ) from error


def _normflows() -> type[nn.Module]:
    base: Any = _host("normflows.flows.base", "normflows").Flow

    class NormflowsBlock(base):
        """A normflows Flow: forward is latent to data."""

        def __init__(self, block: nn.Module, options: Options) -> None:
            super().__init__()
            self.block = check_block(block)
            self.options = options

        def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
            return data_and_log_det(self.block, z, self.options)

        def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
            return noise_of(self.block, z, self.options)

    return NormflowsBlock


def _nflows() -> type[nn.Module]:
    base: Any = _host("nflows.transforms.base", "nflows").Transform

    class NflowsBlock(base):
        """An nflows Transform: forward is data to noise."""

        def __init__(self, block: nn.Module, options: Options) -> None:
            super().__init__()
            self.block = check_block(block)
            self.options = options

        def forward(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            _refuse_condition(context)
            return noise_of(self.block, inputs, self.options)

        def inverse(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            _refuse_condition(context)
            return data_and_log_det(self.block, inputs, self.options)

    return NflowsBlock


def _freia() -> type[nn.Module]:
    base: Any = _host("FrEIA.modules", "FrEIA").InvertibleModule

    class FreiaBlock(base):
        """A FrEIA InvertibleModule: forward is data to latent, rev=True the other way."""

        def __init__(
            self,
            dims_in: Sequence[tuple[int, ...]],
            dims_c: Sequence[tuple[int, ...]] | None = None,
            *,
            block: nn.Module,
            options: Options | None = None,
        ) -> None:
            super().__init__(dims_in, dims_c)
            _refuse_condition(dims_c)
            for dims in self.dims_in:
                if len(dims) != 2:
                    raise ValueError(f"events have shape (T, D), got dims_in={list(dims_in)}")
            self.block = check_block(block)
            self.options = Options() if options is None else options

        def forward(
            self,
            x_or_z: Sequence[Tensor],
            c: Sequence[Tensor] | None = None,
            rev: bool = False,
            jac: bool = True,
        ) -> tuple[tuple[Tensor], Tensor]:
            _refuse_condition(c)
            (x,) = x_or_z
            if jac:
                map_ = data_and_log_det if rev else noise_of
                out, log_det = map_(self.block, x, self.options)
                return (out,), log_det
            out = data_of(self.block, x, self.options) if rev else self.block(x)
            # FrEIA adds what it gets, asked for or not.
            return (out,), x.new_zeros(x.shape[0])

        def output_dims(self, input_dims: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
            if len(input_dims) != 1:
                raise ValueError(f"the block has one input, got {len(input_dims)}: {input_dims}")
            return input_dims

    return FreiaBlock


def _zuko() -> type[nn.Module]:
    base: Any = _host("zuko.lazy", "zuko").LazyTransform

    class ZukoBlock(base):
        """A zuko LazyTransform: the transform it returns is data to noise."""

        def __init__(self, block: nn.Module, options: Options) -> None:
            super().__init__()
            self.block = check_block(block)
            self.options = options

        def forward(self, c: Tensor | None = None) -> torch.distributions.Transform:
            _refuse_condition(c)
            return BlockTransform(self.block, self.options).inv

    return ZukoBlock


def _pyro() -> type[nn.Module]:
    base: Any = _host("pyro.distributions.torch_transform", "pyro-ppl").TransformModule

    class PyroBlock(NoiseToData, base):
        """A Pyro TransformModule: call is noise to data."""

        def __init__(self, block: nn.Module, options: Options, cache_size: int = 0) -> None:
            super().__init__(cache_size=cache_size)
            self.block = check_block(block)
            self.options = options

        def with_cache(self, cache_size: int = 1) -> PyroBlock:
            if cache_size == self._cache_size:
                return self
            return PyroBlock(self.block, self.options, cache_size)

    return PyroBlock


_MAKERS: dict[str, Callable[[], type[nn.Module]]] = {
    "FreiaBlock": _freia,
    "NflowsBlock": _nflows,
    "NormflowsBlock": _normflows,
    "PyroBlock": _pyro,
    "ZukoBlock": _zuko,
}


@functools.cache
def _class(name: str) -> Any:
    made = _MAKERS[name]()
    made.__qualname__ = name  # not inside the function that made it: pickle looks it up here
    return made


def __getattr__(name: str) -> Any:
    if name in _MAKERS:
        return _class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _refuse_condition(condition: object) -> None:
    if condition is not None and (isinstance(condition, Tensor) or condition):
        raise ValueError("the block takes no condition (context, c), but got one")


def to_normflows(
    block: nn.Module,
    *,
    method: str | None = None,
    generator: torch.Generator | None = None,
    tol: float | None = None,
    max_iter: int | None = None,
) -> Any:
    """An invertible block as a Flow of normflows, of which forward is latent to data.

    Args:
        block: a module with forward, inverse, forward_and_log_det and inverse_and_log_det.
        method: how its log-determinants are computed; default as the block was built.
        generator: of random log-determinants.
        tol: tolerance of its inverse.
        max_iter: limit of its inverse.
    """
    return _class("NormflowsBlock")(block, Options(method, generator, tol, max_iter))


def to_nflows(
    block: nn.Module,
    *,
    method: str | None = None,
    generator: torch.Generator | None = None,
    tol: float | None = None,
    max_iter: int | None = None,
) -> Any:
    """An invertible block as a Transform of nflows, of which forward is data to noise.

    Args: as in :func:`to_normflows`.
    """
    return _class("NflowsBlock")(block, Options(method, generator, tol, max_iter))


def to_freia(
    block: nn.Module,
    dims_in: Sequence[tuple[int, ...]] = (),
    *,
    method: str | None = None,
    generator: torch.Generator | None = None,
    tol: float | None = None,
    max_iter: int | None = None,
) -> Any:
    """An invertible block as an InvertibleModule of FrEIA, of which forward is data to latent.

    In a SequenceINN: ``inn.append(lambda dims_in: to_freia(block, dims_in))``.

    Args:
        block: as in :func:`to_normflows`, like the rest.
        dims_in: FrEIA's list with the shape (T, D) of an event.
        method: how its log-determinants are computed.
        generator: of random log-determinants.
        tol: tolerance of its inverse.
        max_iter: limit of its inverse.
    """
    options = Options(method, generator, tol, max_iter)
    return _class("FreiaBlock")(dims_in, block=block, options=options)


def to_zuko(
    block: nn.Module,
    *,
    method: str | None = None,
    generator: torch.Generator | None = None,
    tol: float | None = None,
    max_iter: int | None = None,
) -> Any:
    """An invertible block as a LazyTransform of zuko, whose transform is data to noise.

    Args: as in :func:`to_normflows`.
    """
    return _class("ZukoBlock")(block, Options(method, generator, tol, max_iter))


def to_pyro(
    block: nn.Module,
    *,
    method: str | None = None,
    generator: torch.Generator | None = None,
    tol: float | None = None,
    max_iter: int | None = None,
) -> Any:
    """An invertible block as a TransformModule of Pyro, called with noise, returning data.

    Args: as in :func:`to_normflows`.
    """
    return _class("PyroBlock")(block, Options(method, generator, tol, max_iter))
