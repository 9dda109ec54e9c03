"""Step-by-step decoding through any causal composition of layers.

A module's cache has the shape of the module: attention keeps a :class:`KeyCache`, a sequence a tuple of
its parts' caches, a token-wise layer None. Caches are values: a step returns a new one and leaves the
old one as it was, so that a step can be tried and taken back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from lipformer.certificate.rules import Rules, kind_of
from lipformer.certificate.torch_rules import parts_of
from lipformer.layers.attention.key_cache import KeyCache
from lipformer.layers.branch import Call, call_branch

# None, a KeyCache, a tensor, or a tuple of caches.
Cache = Any
_Rule = Callable[..., "tuple[Tensor, Cache]"]
_R = TypeVar("_R", bound=_Rule)
_rules: Rules[_Rule] = Rules("step", "lipformer.layers.register_step")


def register_step(module_class: type[nn.Module]) -> Callable[[_R], _R]:
    """Decorator that registers the step of a class of causal modules for :func:`step_module`.

    The rule gets the module, new tokens x (B, T, D), the cache of the step before (None at the first)
    and a :class:`Call`, and returns the rows of the new tokens as the full pass would give them, and the
    new cache, made of KeyCache, tensors (B, *), tuples and None.
    """
    return _rules.register(module_class)


def step_module(
    module: nn.Module,
    x: Tensor,
    cache: Cache = None,
    key_padding_mask: Tensor | None = None,
    head_scale: Tensor | None = None,
    context: Tensor | None = None,
) -> tuple[Tensor, Cache]:
    """The rows of new tokens, as the full pass would give them, and the new cache.

    Token-wise layers are called, sequences gone through, attention (built with causal=True) and the
    classes of :func:`register_step` take their step. A token-wise module of your own says so with an
    attribute ``token_wise = True``.

    Args:
        module: causal all the way down.
        x: new tokens (B, T, D).
        cache: what the step before returned, None at the first.
        key_padding_mask: (B, T) of the new tokens.
        head_scale: a factor for each head (see :class:`Call`).
        context: (B, C), likewise.

    Raises:
        TypeError: some part has no step, and is not known to be token-wise.
    """

    def refuse(reason: str, instead: str) -> Exception:
        return TypeError(
            f"{kind_of(module)} has no step: {reason}; step-by-step decoding goes through lipformer's "
            f"causal layers, nn.Sequential, linear layers and activations; use {instead}, or an "
            "attribute token_wise = True"
        )

    if getattr(module, "token_wise", None) is True:
        return call_branch(module, x, key_padding_mask, None, context), None
    return _rules.of(module, refuse)(module, x, cache, Call(key_padding_mask, head_scale, context))


@register_step(nn.Sequential)
def _(module: nn.Sequential, x: Tensor, cache: Cache, call: Call) -> tuple[Tensor, Cache]:
    parts = parts_of(module)
    olds = (None,) * len(parts) if cache is None else cache
    if isinstance(olds, KeyCache) or not isinstance(olds, tuple) or len(olds) != len(parts):
        raise TypeError(
            f"cache must be None or the tuple of {len(parts)} caches of the step before, got "
            f"{type(olds).__name__}"
        )
    news = []
    for part, old in zip(parts.values(), olds, strict=True):
        x, new = step_module(part, x, old, *call)
        news.append(new)
    return x, tuple(news)


def select_cache(cache: Cache, index: Tensor) -> Cache:
    """The cache of the samples of an index (b,)."""
    if isinstance(cache, KeyCache):
        padding = None if cache.padding is None else cache.padding[index]
        return KeyCache(cache.keys[index], cache.seen, padding)
    if isinstance(cache, tuple):
        return tuple(select_cache(part, index) for part in cache)
    return None if cache is None else cache[index]
