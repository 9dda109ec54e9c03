"""Whether the attention that was read from a layer's weights is what the layer computes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lipformer.analysis._heads import Heads
from lipformer.analysis._maps import AttentionMaps

TOLERANCE = 1e-3
"""Largest relative difference that the check may leave; where rounding hides more, float64 decides."""

_WIDE_TOLERANCE = 1e-4
"""In float64: for layers that keep parts of their own (a softmax, angles) in float32."""

_PLAIN = (bool, int, float, str, type(None))


def agrees(found: Tensor, expected: Tensor, constant: Tensor, size: float, eps: float) -> bool:
    """Whether two results (N, E) in float64 agree to rounding in a precision; not if it hides too much.

    Constants are taken off both sides: a large bias would hide any difference of what depends on tokens.

    Args:
        found: what the extracted attention gives, exact.
        expected: the layer's own.
        constant: what of it does not depend on tokens, (E,).
        size: that of the logits, which rounding errors grow with.
        eps: of the precision.
    """
    part = found - constant
    scale = float(part.norm())
    allowed = 32 * eps * ((1 + size) * scale + float(constant.norm()) * math.sqrt(len(part)))
    if eps <= torch.finfo(torch.float64).eps:
        allowed += _WIDE_TOLERANCE * scale
    elif allowed > TOLERANCE * scale:
        return False
    return float((found - expected).norm()) <= allowed


def constant_of(attention: Heads | AttentionMaps, like: Tensor) -> Tensor:
    """What an attention adds to every token whatever the tokens are, (E,), zero for nothing."""
    found = attention.constant() if isinstance(attention, Heads) else attention.constant
    return like.new_zeros(like.shape[-1]) if found is None else found.to(like)


def in_float64(
    module: nn.Module, result: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """What a call of a layer gives with its weights and arguments in float64; hooks run as in the call.

    Args:
        module: the layer, in evaluation mode.
        result: the module that projects its output, or the layer itself.
        args: of the call; None in the place of caches and other objects.
        kwargs: likewise.
    """
    named = {name: _wide(value) for name, value in kwargs.items()}
    output = torch.func.functional_call(module, _weights(module), tuple(map(_wide, args)), named)
    if result is module:
        return output
    mixed = output[0] if isinstance(output, (tuple, list)) else output
    return torch.func.functional_call(result, _weights(result), (mixed,))


def _weights(module: nn.Module) -> dict[str, Tensor]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: t.detach().double() for name, t in tensors if t.is_floating_point()}


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(map(_wide, value))
    return value if isinstance(value, _PLAIN) else None
