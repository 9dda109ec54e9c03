"""Activations of constant 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound


class MaxMin(nn.Module):
    """Sorts feature k and feature k + d/2 of each token: the larger first. Keeps all norms.

    Source: GroupSort with groups of two (Anil, Lucas, Grosse 2019).
    """

    def forward(self, x: Tensor) -> Tensor:
        """(*, d) -> (*, d), d even."""
        if x.shape[-1] % 2:
            raise ValueError(f"MaxMin needs an even number of features, got shape {tuple(x.shape)}")
        a, b = x.chunk(2, dim=-1)
        # Products with 0 and 1: exact for finite numbers, and with gradients several times as fast as
        # maximum and minimum.
        kept = (a.detach() >= b.detach()).to(x.dtype)
        swapped = 1 - kept
        larger = torch.addcmul(kept * a, swapped, b)
        smaller = torch.addcmul(kept * b, swapped, a)
        return torch.cat([larger, smaller], dim=-1)


class LipSwish(nn.Module):
    """SiLU(x) / 1.1, smooth and of constant below 1 (Chen, Behrmann, Duvenaud, Jacobsen 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return F.silu(x) / 1.1


@register_bound(MaxMin)
def _(module: MaxMin, ask: Ask) -> Bound:
    return Bound(1.0, "sorting pairs")


@register_bound(LipSwish)
def _(module: LipSwish, ask: Ask) -> Bound:
    return Bound(1.0, "largest slope 1.0998394 / 1.1")
