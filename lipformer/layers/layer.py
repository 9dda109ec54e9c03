"""What every layer offers: plain weights for inference, and steps of decoding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn

from lipformer.certificate.linear_rules import coefficients
from lipformer.certificate.rules import Rules, kind_of
from lipformer.layers.decoding import Cache, step_module

_Rule = Callable[..., nn.Module]
_B = TypeVar("_B", bound=_Rule)
_rules: Rules[_Rule] = Rules("baked form", "lipformer.layers.register_bake")


def register_bake(module_class: type[nn.Module]) -> Callable[[_B], _B]:
    """Decorator that registers how a class is baked.

    The rule gets a module, a copy that it may change, and returns one with plain weights and the same
    outputs. A module in two places of a model may come to it again, baked. Classes without a rule stay,
    and their parts are baked.
    """
    return _rules.register(module_class)


@torch.no_grad()
def bake(model: nn.Module) -> nn.Module:
    """Returns a copy of a layer or model with plain weights.

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
    def refuse(reason: str, instead: str) -> Exception:
        return TypeError(f"{kind_of(module)} cannot be baked: {reason}; use {instead}")

    rule = _rules.find(module, refuse)
    if rule is not None:
        return rule(module)
    make_plain(module, lambda last: coefficients.find(last, refuse) is not None)
    for name, child in list(module._modules.items()):
        if child is not None and name != "parametrizations":
            module._modules[name] = bake_in_place(child, done)
    if isinstance(module, Layer):
        module.refresh()
    return module


def make_plain(module: nn.Module, applies: Callable[[nn.Module], bool] = lambda last: True) -> None:
    """Puts parametrized weights in place as they are now, those with a last part that it applies to."""
    if not parametrize.is_parametrized(module):
        return
    for name, chain in list(cast(nn.ModuleDict, module.parametrizations).items()):
        if applies(cast(nn.ModuleList, chain)[-1]):
            # Copies share the class that torch made for the original; removing the property from it
            # would take the weight away from all of them.
            cls = type(module)
            module.__class__ = type(cls.__name__, cls.__bases__, dict(cls.__dict__))
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)


class Layer(nn.Module):
    """A module with the methods ``bake()`` and ``step()``."""

    def bake(self) -> nn.Module:
        """A copy with plain weights and the same outputs (see :func:`lipformer.bake`)."""
        return bake(self)

    def step(
        self, x: Tensor, cache: Cache = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        """The rows of new tokens of a causal layer, and the new cache (see :func:`step_module`)."""
        return step_module(self, x, cache, key_padding_mask)

    def refresh(self) -> None:
        """Notes anew what the module knows of the modules in it; called when they were replaced."""


def plain_linear(module: nn.Linear) -> nn.Linear:
    """A linear layer as nn.Linear with its present weight."""
    return linear_of(module.weight, module.bias).train(module.training)


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """An nn.Linear with copies of a weight (out, in) and a bias (out,)."""
    rows, columns = weight.shape
    plain = nn.Linear(columns, rows, bias is not None, device=weight.device, dtype=weight.dtype)
    plain.weight.copy_(weight)
    if bias is not None:
        plain.bias.copy_(bias)
    return plain
