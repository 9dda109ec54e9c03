"""Activations of constant 1."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.functional.tracing import tracing
from lipformer.layers.branch import Call
from lipformer.layers.own_token import push_elementwise
from lipformer.layers.token_wise import register_token_wise


def _swap(x: Tensor, kept: Tensor) -> Tensor:
    """x with features k and k + d/2 swapped where ``kept`` (*, d / 2) is 0 and not 1.

    Linear in x, and its own transpose.

    lerp with weights 0 and 1 is exact unless a difference of two features overflows, and several times
    as fast as a choice by bool.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat([torch.lerp(b, a, kept), torch.lerp(a, b, kept)], dim=-1)


class _SortPairs(torch.autograd.Function):
    """MaxMin in plain reverse mode, written in place: fresh memory costs more than the arithmetic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(torch.ge(a, b, out=torch.empty_like(a)))
        out = torch.empty_like(x)
        larger, smaller = out.chunk(2, dim=-1)
        torch.maximum(a, b, out=larger)
        torch.minimum(a, b, out=smaller)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _swap(grad, *ctx.saved_tensors)


class MaxMin(nn.Module):
    """Sorts features k and k + d/2 of each token, the larger first, which preserves all norms.

    Source: GroupSort with groups of two (Anil, Lucas, Grosse 2019).
    """

    def forward(self, x: Tensor) -> Tensor:
        """(*, d) -> (*, d), d even."""
        if x.shape[-1] % 2:
            raise ValueError(f"MaxMin needs an even number of features, got shape {tuple(x.shape)}")
        if tracing() or forward_ad._current_level >= 0:
            a, b = x.detach().chunk(2, dim=-1)
            return _swap(x, (a >= b).to(x.dtype))
        return _SortPairs.apply(x)


class LipSwish(nn.Module):
    """SiLU(x) / 1.1, smooth and of constant below 1 (Chen, Behrmann, Duvenaud, Jacobsen 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return F.silu(x) / 1.1


def _push_max_min(module: MaxMin, x: Tensor, tangents: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """A permutation of each pair of features, the identity where the two are equal."""
    a, b = x.detach().chunk(2, dim=-1)
    return module(x), _swap(tangents, (a >= b).to(x.dtype))


@register_bound(MaxMin)
def _(module: MaxMin, ask: Ask) -> Bound:
    return Bound(1.0, "sorting pairs")


@register_bound(LipSwish)
def _(module: LipSwish, ask: Ask) -> Bound:
    return Bound(1.0, "largest slope 1.0998394 / 1.1")


register_token_wise(LipSwish, push_elementwise)
register_token_wise(MaxMin, _push_max_min)
