"""Bounds of torch's linear layers: Linear, Conv1d, Conv2d."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn

from lipformer.certificate.bounds import Ask, Bound, register_bound
from lipformer.certificate.paths import through
from lipformer.certificate.rules import Rules, refuse_hooks
from lipformer.functional import spectral_norm_bound
from lipformer.functional.rounding import enlarge, is_cast, running


def spectral(weight: Tensor) -> Tensor:
    """An upper bound on ||W|| as a float64 scalar that keeps its gradient."""
    return spectral_norm_bound(weight).double()


def linf_norm(weight: Tensor) -> Tensor:
    """||W||_inf, the largest absolute row sum of (*, m, n), rounded up, in float64.

    A float64 sum of n numbers is off by at most n 2^-53 of it.
    """
    rows = weight.double().abs().sum(-1)
    # Of no rows the largest is 0.
    return enlarge(rows.amax(-1) if weight.shape[-2] else rows.sum(-1), weight.shape[-1])


def as_run(weight: Tensor, ask: Ask) -> Tensor:
    """A weight as products take it: inside autocast rounded, but for what is divided in a forward pass.

    Factors are the same inside and outside of autocast, so that it changes nothing but rounding.
    """
    return weight if ask.in_forward else running(weight)


def linear_bound(weight: Tensor, ask: Ask) -> Bound:
    """A token-wise linear map: ||W|| in the l2, token and self norms, ||W||_inf in linf."""
    weight = as_run(weight, ask)
    if ask.norm == "linf":
        return Bound(linf_norm(weight), "largest absolute row sum")
    norm = ask.spectral_norm(weight)
    passage = partial(through, matrix=weight, known=norm) if ask.follows else None
    return Bound(norm, "spectral norm", passage=passage)


@register_bound(nn.Linear)
def _(module: nn.Linear, ask: Ask) -> Bound:
    coeff = None if ask.norm == "linf" else known_coefficient(module)
    if coeff is None or (not ask.in_forward and _rounded(module)):
        return linear_bound(module.weight, ask)
    passage = None
    # On other devices a pass through many layers derives their weights together, with other rounding.
    # What comes before a bound in a chain may be random or change: the norm alone is known for good.
    alone = len(_chain(module)) == 1
    if ask.follows and alone and module.weight.device.type == "cpu":
        weight = module.weight.detach()
        # There, too, last digits may be others, most of all those of orthogonal weights, which are
        # derived in float32 at least: 46 eps were seen.
        eps = max(torch.finfo(torch.float32).eps, torch.finfo(weight.dtype).eps)
        error = 64.0 * eps * weight.double().norm()
        passage = partial(through, matrix=weight, known=coeff, error=error)
    return Bound(coeff, "spectrally bounded weight", passage=passage)


def _rounded(module: nn.Module) -> bool:
    """Whether products take another weight than the bounded one, inside autocast."""
    return any(map(is_cast, (*module.parameters(), *module.buffers())))


coefficients: Rules[Callable[[nn.Module], float]] = Rules("coefficient", "coefficients.register")
"""What a parametrization that is the last of a weight guarantees for its norm."""


class _NotKnown(Exception):
    pass


def _chain(module: nn.Module) -> nn.ModuleList:
    """The parametrizations of the weight, in the order in which they run."""
    return cast(nn.ModuleList, cast(nn.ModuleDict, module.parametrizations)["weight"])


def known_coefficient(module: nn.Module) -> float | None:
    """The norm that a parametrization of the weight guarantees, None if it is to be measured."""
    if not parametrize.is_parametrized(module, "weight"):
        return None
    chain = _chain(module)
    try:
        refuse_hooks(chain, _NotKnown)
        rule = coefficients.find(chain[-1], _NotKnown)
    except _NotKnown:
        return None
    return None if rule is None else rule(chain[-1])


def patches_of_a_pixel(
    kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> int:
    """The most patches that one pixel lies in."""
    sizes = zip(kernel_size, stride, dilation, strict=True)
    # A list: torch.compile follows no generator here.
    return math.prod([-(-k // s) if d == 1 else k for k, s, d in sizes])


def conv_bound(
    weight: Tensor,
    groups: int,
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    norm: str = "l2",
) -> Tensor:
    r"""Bounds the norm of a convolution with zero padding and any stride, dilation and groups.

    In l2 the smaller of :math:`\sum_a \|K_a\|` over the taps :math:`a` (each tap is a matrix times a
    shift, and a shift has norm at most 1) and :math:`\sqrt{r}\,\|K\|` with the kernel as one matrix
    (out, in x taps), where each input pixel lies in at most r patches. In linf the largest absolute
    row sum of that matrix.

    Args:
        weight: the kernel (out, in / groups, *kernel_size).
        groups: number of groups.
        stride: one stride per spatial dimension.
        dilation: one dilation per spatial dimension.
        norm: "l2" or "linf".
    """
    kernel_size = weight.shape[2:]
    # (groups, out, in, taps)
    taps = weight.unflatten(0, (groups, -1)).flatten(3)
    flat = taps.flatten(2)
    if norm == "linf":
        return linf_norm(flat).amax()
    by_taps = spectral(taps.movedim(-1, 1)).sum(1).amax()
    by_patches = math.sqrt(patches_of_a_pixel(kernel_size, stride, dilation)) * spectral(flat).amax()
    # The sum over the taps rounds once for each.
    return enlarge(torch.minimum(by_taps, by_patches), taps.shape[-1])


def repeats_pixels(module: nn.Conv1d | nn.Conv2d) -> bool:
    """Whether padding lets a tap see a pixel twice, which conv_bound does not cover in l2.

    Zero padding never does. Circular padding does not if the output has the input's size: stride 1
    and both sides together dilation (kernel_size - 1), so that each tap is a rotation of the pixels.
    """
    if module.padding_mode == "zeros":
        return False
    if module.padding_mode != "circular" or any(s != 1 for s in module.stride):
        return True
    # What torch pads by, whatever `padding` was set to later: pairs, the last dimension first.
    sides = module._reversed_padding_repeated_twice
    pads = [sides[i] + sides[i + 1] for i in range(0, len(sides), 2)][::-1]
    sizes = zip(pads, module.dilation, module.kernel_size, strict=True)
    return any(p != d * (k - 1) for p, d, k in sizes)


def _conv_rule(module: nn.Conv1d | nn.Conv2d, ask: Ask) -> Bound:
    ask.only("l2", "linf")
    ask.along(1 - module.weight.ndim)  # without a batch the samples would be channels
    if ask.norm == "l2" and repeats_pixels(module):
        raise ask.refuse(
            f"padding_mode={module.padding_mode!r} with stride={module.stride} and "
            f"padding={module.padding!r} repeats pixels",
            "padding_mode='zeros', or circular padding with stride 1 that keeps the size",
        )
    weight = as_run(module.weight, ask)
    value = conv_bound(weight, module.groups, module.stride, module.dilation, ask.norm)
    return Bound(value, "norms of the kernel's taps", tokens=None, dims=ask.dims)


register_bound(nn.Conv1d)(_conv_rule)
register_bound(nn.Conv2d)(_conv_rule)
