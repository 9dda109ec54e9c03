"""Layers that can be divided head by head, each head by its own gain.

A head of short range has a small gain and need hardly be shrunk; one factor for all would shrink it as
much as the others (docs/theory, section 2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from lipformer.certificate import Ask, Bound
from lipformer.certificate.bounds import bound_of, linked
from lipformer.certificate.rules import Rules
from lipformer.certificate.torch_rules import chain, parts_of


class Divisor(NamedTuple):
    """What the heads of a layer are divided by in one norm.

    With factors s_h the constant is at most max_h (s_h + lost_h) bound_h.

    Attributes:
        bound: (H,), relative rounding errors of what the factors become part of included.
        lost: (H,), what each factor loses to absolute ones, or None.
    """

    bound: Tensor
    lost: Tensor | None


class PerHead(NamedTuple):
    """What a class of layers offers.

    Attributes:
        matrices: (layer, norms) -> the matrices (*, m, n) whose spectral norms ``divisors`` needs.
        divisors: (layer, asks, bounds of those norms) -> a Divisor for each ask: what its heads are
            divided by to give the layer constant 1.
        forward: (layer, x, factors of the heads (H,), key_padding_mask) -> the output.
        bound: (layer, ask, head_scale) -> the bound of the layer with these factors.
        bake: (layer, head_scale) -> the layer with plain weights, the factors among them.
    """

    matrices: Callable[..., list[Tensor]]
    divisors: Callable[..., list[Divisor]]
    forward: Callable[..., Tensor]
    bound: Callable[..., Bound]
    bake: Callable[..., nn.Module]


per_head: Rules[PerHead] = Rules("gain for each head", "lipformer.layers.per_head.per_head.register")


def divided_part(module: nn.Module, ask: Ask) -> tuple[nn.Module, PerHead] | None:
    """The part of a chain that can be divided head by head, if there is one and no other like it."""
    parts = chain(module, ask)
    found = [(part, rule) for part in parts if (rule := per_head.find(part, ask.refuse))]
    # A Sequential with a bound of its own is no chain, but would pass factors on to what is in it.
    hidden = any(type(part).forward is nn.Sequential.forward for part in parts)
    return found[0] if len(found) == 1 and not hidden else None


def chain_bound(module: nn.Module, ask: Ask, layer: nn.Module, answer: Callable[[Ask], Bound]) -> Bound:
    """The bound of a chain with ``answer(ask)`` for that of one of its parts."""

    def rule(part: nn.Module) -> Callable[[Ask], Bound]:
        # By its place in the chain alone: a second use inside another part has the layer's own bound.
        return lambda ask: answer(ask) if part is layer else bound_of(part, ask)

    # The product, by which it is divided, is the bound.
    return linked(ask.in_turn(map(rule, chain(module, ask))))


def replace_part(module: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """A chain with another module in the place of one of its parts; changes its Sequentials."""
    if module is old:
        return new
    if type(module).forward is nn.Sequential.forward:
        for name, part in parts_of(module).items():
            module._modules[name] = replace_part(part, old, new)
    return module
