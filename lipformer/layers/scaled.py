"""A module times a fixed number, and a module without the rest of its tuple."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.certificate.paths import then_scaled
from lipformer.functional.rounding import ROUND_UP, multiply_down
from lipformer.layers.branch import Call, call_branch
from lipformer.layers.decoding import Cache, register_step, step_module
from lipformer.layers.layer import Layer, bake_in_place, register_bake
from lipformer.layers.own_token import push_own, register_own_token


def _held(module: FirstOutput | Scaled) -> dict[str, nn.Module]:
    return {"module": module.module}


class FirstOutput(Layer):
    """A module without the rest of the tuple it returns: what a baked contractive attention becomes.

    Args:
        module: any module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Shapes as the module's."""
        return call_branch(self.module, x, key_padding_mask, None, context)


@register_bound(FirstOutput)
def _(module: FirstOutput, ask: Ask) -> Bound:
    inner = ask.child(module.module, "module")
    return Bound(inner.value, inner.theorem, (inner,), passage=inner.passage)


@register_step(FirstOutput)
def _(module: FirstOutput, x: Tensor, cache: Cache, call: Call) -> tuple[Tensor, Cache]:
    return step_module(module.module, x, cache, *call.inside())


@register_own_token(FirstOutput, parts=_held)
def _(module: FirstOutput, x: Tensor, tangents: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    return push_own(module.module, x, tangents, *call.inside())


class Scaled(Layer):
    """A module times a fixed number: the head of "lipschitz" models, and a baked Contractive.

    Args:
        module: any module.
        factor: the number, a scalar tensor.
    """

    factor: Tensor
    power: Tensor | None

    def __init__(self, module: nn.Module, factor: Tensor) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("factor", factor)
        self.register_buffer("power", None, persistent=False)  # known once baked

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Shapes as the module's."""
        factor, module = self.factor, self.module
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
        plain = type(module).forward is nn.Linear.forward and not hooked
        if isinstance(module, nn.Linear) and plain:
            # A power of two goes into the weight, which is exact: a large factor behind the product
            # would multiply the gradients that float16-mixed training holds in float16. A small one
            # would leave the range of float16 there.
            power = _power_of_two(factor) if self.power is None else self.power
            factor = factor / power
            bias = None if module.bias is None else module.bias * power
            out = F.linear(x, module.weight * power, bias)
        else:
            out = call_branch(module, x, key_padding_mask, None, context)
        return multiply_down(out, factor)


def _power_of_two(factor: Tensor) -> Tensor:
    """The power of two above the size of a factor; at least 1."""
    # fmax takes the 1 where 0 / 0 is not a number.
    return torch.fmax(factor / torch.frexp(factor).mantissa, torch.ones_like(factor))


@register_bake(Scaled)
def _(module: Scaled) -> Scaled:
    module.module = bake_in_place(module.module)
    module.power = _power_of_two(module.factor)  # ONNX has no frexp
    return module


@register_bound(Scaled)
def _(module: Scaled, ask: Ask) -> Bound:
    inner = ask.child(module.module, "module")
    factor = module.factor.double().abs() * ROUND_UP**2
    passage = then_scaled(inner.passage, factor)
    return Bound(inner.value * factor, "fixed factor", (inner,), passage=passage)


@register_step(Scaled)
def _(module: Scaled, x: Tensor, cache: Cache, call: Call) -> tuple[Tensor, Cache]:
    out, cache = step_module(module.module, x, cache, *call.inside())
    return multiply_down(out, module.factor), cache


@register_own_token(Scaled, parts=_held)
def _(module: Scaled, x: Tensor, tangents: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    out, pushed = push_own(module.module, x, tangents, *call.inside())
    return multiply_down(out, module.factor), multiply_down(pushed, module.factor)
