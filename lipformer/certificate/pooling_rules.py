"""Bounds of torch's pooling layers, without knowing how many pixels there are."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from lipformer.certificate.bounds import Ask, Bound, register_bound
from lipformer.certificate.linear_rules import patches_of_a_pixel
from lipformer.functional.rounding import ROUND_UP

AvgPool = nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d
MaxPool = nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d
AdaptivePool = (
    nn.AdaptiveAvgPool1d
    | nn.AdaptiveAvgPool2d
    | nn.AdaptiveAvgPool3d
    | nn.AdaptiveMaxPool1d
    | nn.AdaptiveMaxPool2d
    | nn.AdaptiveMaxPool3d
)


def _each(value: Any, dims: int) -> tuple[int, ...]:
    """A setting for each of the pooled dimensions."""
    given = value if isinstance(value, tuple) else (value,) * dims
    return (given * dims if len(given) == 1 else given)[:dims]


def _pooled(ask: Ask, dims: int, module: nn.Module) -> None:
    """What holds for all of them: the last dimensions are pooled, and one tensor is returned."""
    ask.only("l2", "linf")
    ask.along(-dims)
    if getattr(module, "return_indices", False):
        raise ask.refuse("with return_indices it returns a tuple", "return_indices=False")


def avg_pool_bound(module: AvgPool, dims: int, norm: str) -> float:
    r"""Schur's test: :math:`\sqrt{\text{largest row sum} \times \text{largest column sum}}` in l2.

    A row holds at most :math:`K = \prod k` entries :math:`1/c`, a column as many as patches hold the
    pixel, at most r. Entries divide by c = K, or by the pixels that are there: at least
    :math:`\prod \max(1, k - 2p)` with padding p that does not count, at least one with ``ceil_mode``.
    In linf the largest row sum: 1, or K / c where ``divisor_override`` is c.
    """
    kernel, padding = _each(module.kernel_size, dims), _each(module.padding, dims)
    size = math.prod(kernel)
    count, rows = size, 1.0
    override = getattr(module, "divisor_override", None)
    if override is not None:  # torch refuses to divide by zero
        count, rows = abs(override or 1), size / abs(override or 1) * ROUND_UP
    elif module.ceil_mode:
        count = 1
    elif not module.count_include_pad:
        count = math.prod(max(1, k - 2 * p) for k, p in zip(kernel, padding, strict=True))
    if norm == "linf":
        return rows
    patches = patches_of_a_pixel(kernel, _each(module.stride, dims), (1,) * dims)
    return math.sqrt(rows * patches / count) * (1.0 if patches == count else ROUND_UP**2)


def _register(
    dims: int, avg: type[nn.Module], most: type[nn.Module], *adaptive: type[nn.Module]
) -> None:
    @register_bound(avg)
    def _(module: AvgPool, ask: Ask) -> Bound:
        _pooled(ask, dims, module)
        return Bound(
            avg_pool_bound(module, dims, ask.norm), "mean of pixels", tokens=None, dims=ask.dims
        )

    @register_bound(most)
    def _(module: MaxPool, ask: Ask) -> Bound:
        """An output moves by at most the largest move in its patch, and r patches hold a pixel."""
        _pooled(ask, dims, module)
        sizes = (_each(v, dims) for v in (module.kernel_size, module.stride, module.dilation))
        patches = 1 if ask.norm == "linf" else patches_of_a_pixel(*sizes)
        value = math.sqrt(patches) * (1.0 if patches == 1 else ROUND_UP)
        return Bound(value, "maximum over pixels", tokens=None, dims=ask.dims)

    def whole(module: AdaptivePool, ask: Ask) -> Bound:
        """To one pixel: at most 1. To more it depends on the pixels there are, which may be repeated."""
        _pooled(ask, dims, module)
        if ask.norm == "l2" and _each(module.output_size, dims) != (1,) * dims:
            raise ask.refuse(
                f"with output_size={module.output_size} its constant depends on the number of pixels",
                "output_size=1, or nn.AvgPool or nn.MaxPool, or certify(model, example=x)",
            )
        return Bound(1.0, "pooling to one pixel", tokens=None, dims=ask.dims)

    for cls in adaptive:
        register_bound(cls)(whole)


_register(1, nn.AvgPool1d, nn.MaxPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d)
_register(2, nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
_register(3, nn.AvgPool3d, nn.MaxPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d)
