"""Plain weights for inference: the same outputs, with no normalisation left to run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.layers.branch import call_branch

_B = TypeVar("_B", bound=Callable[..., nn.Module])
_bakers: dict[type[nn.Module], Callable[[Any], nn.Module]] = {}


def register_bake(module_class: type[nn.Module]) -> Callable[[_B], _B]:
    """Decorator: how a class is baked. The function may change the module it gets, a copy."""

    def register(baker: _B) -> _B:
        _bakers[module_class] = baker
        return baker

    return register


@torch.no_grad()
def bake(model: nn.Module) -> nn.Module:
    """A copy of a layer or model with plain weights.

    SpectralLinear becomes nn.Linear, Contractive attention becomes attention with scaled output
    weights, the paper's form of attention becomes the lean form, weights bounded by
    :func:`lipformer.spectral_bound` become plain ones. Outputs stay the same up to rounding.

    Example:
        >>> import lipformer as lf
        >>> bake(lf.SpectralLinear(4, 4))
        Linear(in_features=4, out_features=4, bias=True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"bake takes a torch.nn.Module, got {type(model).__name__}")
    return bake_in_place(copy.deepcopy(model))


def bake_in_place(module: nn.Module, done: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """The baked form of a module that may be changed; ``done`` keeps shared modules shared."""
    done = {} if done is None else done
    if module not in done:
        done[module] = _baked(module, done)
    return done[module]


def _baked(module: nn.Module, done: dict[nn.Module, nn.Module]) -> nn.Module:
    for cls in type(module).__mro__:
        if cls in _bakers:
            return _bakers[cls](module)
    if parametrize.is_parametrized(module):
        for name, chain in list(cast(nn.ModuleDict, module.parametrizations).items()):
            if hasattr(cast(nn.ModuleList, chain)[-1], "certified_coeff"):
                # Copies share the class that torch made for the original; removing the property
                # from it would take the weight away from all of them.
                cls = type(module)
                module.__class__ = type(cls.__name__, cls.__bases__, dict(cls.__dict__))
                parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    for name, child in list(module._modules.items()):
        if child is not None and name != "parametrizations":
            module._modules[name] = bake_in_place(child, done)
    if isinstance(module, Bakeable):
        module.refresh()
    return module


class Bakeable(nn.Module):
    """A module with the method ``bake()``."""

    def bake(self) -> nn.Module:
        """A copy with plain weights and the same outputs (see :func:`lipformer.bake`)."""
        return bake(self)

    def refresh(self) -> None:
        """Notes anew what the module knows of the modules in it; called when they were replaced."""


def plain_linear(module: nn.Linear) -> nn.Linear:
    """A linear layer as nn.Linear with its present weight."""
    weight = module.weight
    plain = nn.Linear(
        module.in_features,
        module.out_features,
        module.bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )
    plain.weight.copy_(weight)
    if module.bias is not None:
        plain.bias.copy_(module.bias)
    return plain.train(module.training)


def round_down(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """A positive factor in a dtype of the output, rounded towards zero."""
    return (factor * (1.0 - torch.finfo(dtype).eps)).to(dtype)


class FirstOutput(Bakeable):
    """A module without the rest of the tuple it returns: what a baked contractive attention becomes.

    Args:
        module: any module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Shapes as the module's."""
        return call_branch(self.module, x, key_padding_mask)


@register_bound(FirstOutput)
def _(module: FirstOutput, ask: Ask) -> Bound:
    inner = ask.child(module.module, "module")
    return Bound(inner.value, inner.theorem, (inner,))


class Scaled(Bakeable):
    """A module times a fixed number: what a baked Contractive becomes.

    Args:
        module: any module.
        factor: the number, a tensor that broadcasts.
    """

    factor: Tensor

    def __init__(self, module: nn.Module, factor: Tensor) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("factor", factor)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Shapes as the module's."""
        factor, module = self.factor, self.module
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
        plain = type(module).forward is nn.Linear.forward and not hooked
        if isinstance(module, nn.Linear) and plain and factor.ndim == 0:
            # A power of two goes into the weight, which is exact: a large factor behind the product
            # would multiply the gradients that float16-mixed training holds in float16.
            mantissa = torch.frexp(factor).mantissa
            power = torch.where(mantissa == 0.0, 1.0, factor / mantissa)
            factor = mantissa
            bias = None if module.bias is None else module.bias * power
            out = F.linear(x, module.weight * power, bias)
        else:
            out = call_branch(module, x, key_padding_mask)
        return out * round_down(factor, out.dtype)


@register_bound(Scaled)
def _(module: Scaled, ask: Ask) -> Bound:
    inner = ask.child(module.module, "module")
    factor = module.factor.double().abs().max() * (1 + 1e-15)
    return Bound(inner.value * factor, "fixed factor", (inner,))
