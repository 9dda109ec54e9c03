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

        def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            return self.data_and_log_det(z, context)

        def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            return self.noise_and_log_det(z, context)

    return NormflowsBlock


def _nflows() -> type[nn.Module]:
    base: Any = _host("nflows.transforms.base", "nflows").Transform

    class NflowsBlock(Adapted, base):
        """An nflows Transform: forward is data to noise."""

        def forward(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            return self.noise_and_log_det(inputs, context)

        def inverse(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            return self.data_and_log_det(inputs, context)

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
            dim = getattr(block, "context_dim", None)
            if dims_c and [tuple(dims) for dims in dims_c] != [(dim,)]:
                raise ValueError(f"the block has context_dim={dim}, got dims_c={list(dims_c)}")

        def forward(
            self,
            x_or_z: Sequence[Tensor],
            c: Sequence[Tensor] | None = None,
            rev: bool = False,
            jac: bool = True,
        ) -> tuple[tuple[Tensor], Tensor]:
            (x,) = x_or_z
            (context,) = c or (None,)
            if jac:
                out, log_det = (self.data_and_log_det if rev else self.noise_and_log_det)(x, context)
                return (out,), log_det
            out = (self.data_of if rev else self.noise_of)(x, context)
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
            return BlockTransform(self.block, replace(self.options, context=self.condition_of(c))).inv

    return ZukoBlock


def _pyro() -> type[nn.Module]:
    base: Any = _host("pyro.distributions.torch_transform", "pyro-ppl").TransformModule

    class PyroBlock(NoiseToData, base):
        """A Pyro TransformModule: call is noise to data."""

    return PyroBlock


def _pyro_conditional() -> type[nn.Module]:
    base: Any = _host("pyro.distributions.conditional", "pyro-ppl").ConditionalTransformModule

    class PyroConditionalBlock(Adapted, base):
        """A Pyro ConditionalTransformModule: ``condition(context)`` is a transform, noise to data."""

        def condition(self, context: Tensor) -> BlockTransform:
            return BlockTransform(self.block, replace(self.options, context=context))

    return PyroConditionalBlock


_MAKERS: dict[str, Callable[[], type[nn.Module]]] = {
    "FreiaBlock": _freia,
    "NflowsBlock": _nflows,
    "NormflowsBlock": _normflows,
    "PyroBlock": _pyro,
    "PyroConditionalBlock": _pyro_conditional,
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


def to_normflows(block: nn.Module, **options: Any) -> Any:
    """Wraps an invertible block as a Flow of normflows; its forward is latent to data.

    Options as in :func:`to_torch_transform`.
    """
    return _class("NormflowsBlock")(block, Options(**options))


def to_nflows(block: nn.Module, **options: Any) -> Any:
    """Wraps an invertible block as a Transform of nflows; its forward is data to noise."""
    return _class("NflowsBlock")(block, Options(**options))


def to_freia(
    block: nn.Module,
    dims_in: Sequence[tuple[int, ...]] = (),
    dims_c: Sequence[tuple[int, ...]] | None = None,
    **options: Any,
) -> Any:
    """Wraps an invertible block as an InvertibleModule of FrEIA; its forward is data to latent.

    In a SequenceINN: ``inn.append(lambda dims_in: to_freia(block, dims_in))``, with FrEIA's list of the
    shape of an event: (T, D), or (D,) with ``vectors``. With a context:
    ``inn.append(lambda dims_in, dims_c: to_freia(block, dims_in, dims_c), cond=0, cond_shape=(C,))``.
    """
    return _class("FreiaBlock")(dims_in, dims_c, block=block, options=Options(**options))


def to_zuko(block: nn.Module, **options: Any) -> Any:
    """Wraps an invertible block as a LazyTransform of zuko; its transform is data to noise."""
    return _class("ZukoBlock")(block, Options(**options))


def to_pyro(block: nn.Module, **options: Any) -> Any:
    """Wraps an invertible block as a TransformModule of Pyro, from noise to data.

    A block that takes a context becomes a ConditionalTransformModule, unless ``context`` is given here.
    """
    given = Options(**options)
    conditional = getattr(block, "context_dim", None) is not None and given.context is None
    return _class("PyroConditionalBlock" if conditional else "PyroBlock")(block, given)
