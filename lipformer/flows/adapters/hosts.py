"""Invertible blocks as modules of normflows, nflows, FrEIA, zuko and Pyro.

Classes that inherit from another library's are made when they are first asked for, once, and this
module hands them out by name (``__getattr__``), so that pickle finds them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lipformer.flows.adapters.directions import Adapted, Options
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

    class NormflowsBlock(Adapted, base):
        """A normflows Flow: forward is latent to data."""

        def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
            return self.data_and_log_det(z)

        def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
            return self.noise_and_log_det(z)

    return NormflowsBlock


def _nflows() -> type[nn.Module]:
    base: Any = _host("nflows.transforms.base", "nflows").Transform

    class NflowsBlock(Adapted, base):
        """An nflows Transform: forward is data to noise."""

        def forward(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            _refuse_condition(context)
            return self.noise_and_log_det(inputs)

        def inverse(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            _refuse_condition(context)
            return self.data_and_log_det(inputs)

    return NflowsBlock


def _freia() -> type[nn.Module]:
    base: Any = _host("FrEIA.modules", "FrEIA").InvertibleModule

    class FreiaBlock(Adapted, base):
        """A FrEIA InvertibleModule: forward is data to latent, rev=True the other way."""

        def __init__(
            self,
            dims_in: Sequence[tuple[int, ...]],
            dims_c: Sequence[tuple[int, ...]] | None = None,
            *,
            block: nn.Module,
            options: Options | None = None,
        ) -> None:
            options = options or Options()
            if dims_in:
                options = replace(options, event_shape=dims_in[0])
            super().__init__(block, options, dims_in, dims_c)
            _refuse_condition(dims_c)

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
                out, log_det = (self.data_and_log_det if rev else self.noise_and_log_det)(x)
                return (out,), log_det
            out = (self.data_of if rev else self.noise_of)(x)
            # FrEIA adds what it gets, asked for or not.
            return (out,), x.new_zeros(x.shape[0])

        def output_dims(self, input_dims: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
            if len(input_dims) != 1:
                raise ValueError(f"the block has one input, got {len(input_dims)}: {input_dims}")
            return input_dims

    return FreiaBlock


def _zuko() -> type[nn.Module]:
    base: Any = _host("zuko.lazy", "zuko").LazyTransform

    class ZukoBlock(Adapted, base):
        """A zuko LazyTransform: the transform it returns is data to noise."""

        def forward(self, c: Tensor | None = None) -> torch.distributions.Transform:
            _refuse_condition(c)
            return BlockTransform(self.block, self.options).inv

    return ZukoBlock


def _pyro() -> type[nn.Module]:
    base: Any = _host("pyro.distributions.torch_transform", "pyro-ppl").TransformModule

    class PyroBlock(NoiseToData, base):
        """A Pyro TransformModule: call is noise to data."""

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


def to_normflows(block: nn.Module, **options: Any) -> Any:
    """An invertible block as a Flow of normflows, of which forward is latent to data.

    Args: as in :func:`to_torch_transform`, here and below.
    """
    return _class("NormflowsBlock")(block, Options(**options))


def to_nflows(block: nn.Module, **options: Any) -> Any:
    """An invertible block as a Transform of nflows, of which forward is data to noise."""
    return _class("NflowsBlock")(block, Options(**options))


def to_freia(block: nn.Module, dims_in: Sequence[tuple[int, ...]] = (), **options: Any) -> Any:
    """An invertible block as an InvertibleModule of FrEIA, of which forward is data to latent.

    In a SequenceINN: ``inn.append(lambda dims_in: to_freia(block, dims_in))``, with FrEIA's list of the
    shape of an event: (T, D), or (D,) with ``vectors``.
    """
    return _class("FreiaBlock")(dims_in, block=block, options=Options(**options))


def to_zuko(block: nn.Module, **options: Any) -> Any:
    """An invertible block as a LazyTransform of zuko, whose transform is data to noise."""
    return _class("ZukoBlock")(block, Options(**options))


def to_pyro(block: nn.Module, **options: Any) -> Any:
    """An invertible block as a TransformModule of Pyro, called with noise, returning data."""
    return _class("PyroBlock")(block, Options(**options))
