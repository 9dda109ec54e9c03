"""Layers that can be divided head by head, each head by its own gain.

A head of short range has a small gain and need hardly be shrunk; one factor for all would shrink it as
much as the others (docs/theory, section 2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from lipformer.certificate import Ask
from lipformer.certificate.rules import Rules
from lipformer.certificate.torch_rules import chain


class PerHead(NamedTuple):
    """What a class of layers offers.

    Attributes:
        matrices: (layer, norms) -> the matrices (*, m, n) whose spectral norms ``divisors`` needs.
        divisors: (layer, asks, bounds of those norms) -> (H,) for each ask: what its heads are divided
            by to give the layer constant 1.
        forward: (layer, x, factors of the heads (H,), key_padding_mask) -> the output.
        bound: (layer, ask, head_scale) -> the constant of the layer with these factors.
        bake: (layer, head_scale) -> the layer with plain weights, the factors among them.
    """

    matrices: Callable[..., list[Tensor]]
    divisors: Callable[..., list[Tensor]]
    forward: Callable[..., Tensor]
    bound: Callable[..., Tensor]
    bake: Callable[..., nn.Module]


per_head: Rules[PerHead] = Rules("gain for each head", "lipformer.layers.per_head.per_head.register")


def divided_part(module: nn.Module, ask: Ask) -> tuple[nn.Module, PerHead] | None:
    """The part of a chain that can be divided head by head, if there is one and no other like it."""
    found = [(part, rule) for part in chain(module, ask) if (rule := per_head.find(part, ask.refuse))]
    return found[0] if len(found) == 1 else None
