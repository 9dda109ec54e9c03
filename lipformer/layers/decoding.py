"""Step-by-step decoding through any causal composition of layers.

A module's cache has the shape of the module: attention keeps a :class:`KeyCache`, a sequence a tuple of
its parts' caches, a token-wise layer None. Caches are values: a step returns a new one and leaves the
old one as it was, so that a step can be tried and taken back.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

from torch import Tensor, nn

from lipformer.layers.activations import LipSwish, MaxMin
from lipformer.layers.attention.key_cache import KeyCache
from lipformer.layers.attention.multihead import L2MultiheadAttention
from lipformer.layers.baking import FirstOutput, Scaled, round_down
from lipformer.layers.branch import call_branch
from lipformer.layers.token_norms import BallProjection, CenterNorm

# None, a KeyCache, or a tuple of caches.
Cache = Any

# Whatever the input, these treat each token alike and alone.
_TOKEN_WISE: tuple[type[nn.Module], ...] = (
    *(nn.Linear, MaxMin, LipSwish, CenterNorm, BallProjection, nn.Identity, nn.ReLU, nn.ReLU6),
    *(nn.Tanh, nn.Hardtanh, nn.Tanhshrink, nn.Softsign, nn.Softplus, nn.LogSigmoid, nn.Softshrink),
    *(nn.Sigmoid, nn.Hardsigmoid, nn.Hardswish, nn.SiLU, nn.Mish, nn.SELU, nn.GELU, nn.LeakyReLU),
    *(nn.ELU, nn.CELU, nn.Dropout),
)


class _Steps(Protocol):
    def step(
        self, x: Tensor, cache: Cache = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Cache]: ...


def step_module(
    module: nn.Module, x: Tensor, cache: Cache = None, key_padding_mask: Tensor | None = None
) -> tuple[Tensor, Cache]:
    """The rows of new tokens, as the full pass would give them, and the new cache.

    Token-wise layers are called, sequences gone through, attention (built with causal=True) and all
    modules with a method ``step(x, cache, key_padding_mask)`` take their step. A token-wise module of
    your own says so with an attribute ``token_wise = True``.

    Args:
        module: causal all the way down.
        x: new tokens (B, T, D).
        cache: what the step before returned, None at the first.
        key_padding_mask: (B, T) of the new tokens.

    Raises:
        TypeError: some part has no step, and is not known to be token-wise.
    """
    if type(module).forward is nn.Sequential.forward:
        # Before the method `step`: FeedForward's comes here.
        return _step_sequence(module, x, cache, key_padding_mask)
    if isinstance(module, L2MultiheadAttention):
        if module.causal is not True:
            raise ValueError(f"step needs attention built with causal=True, got {module.causal}")
        return module.step(x, cache, key_padding_mask)
    if isinstance(module, FirstOutput):
        return step_module(module.module, x, cache, key_padding_mask)
    if isinstance(module, Scaled):
        out, cache = step_module(module.module, x, cache, key_padding_mask)
        return out * round_down(module.factor, out.dtype), cache
    if callable(getattr(module, "step", None)):
        return cast(_Steps, module).step(x, cache, key_padding_mask)
    if _is_token_wise(module):
        return call_branch(module, x, key_padding_mask), None
    raise TypeError(
        f"{type(module).__name__} has no step and is not known to be token-wise; step-by-step decoding "
        "goes through lipformer's causal layers, nn.Sequential, linear layers and activations, and "
        "modules with a method step(x, cache, key_padding_mask) or an attribute token_wise = True"
    )


def _step_sequence(
    module: nn.Module, x: Tensor, cache: Cache, key_padding_mask: Tensor | None
) -> tuple[Tensor, Cache]:
    # Not children(), which leaves out a module's second use.
    parts = [part for part in module._modules.values() if part is not None]
    olds = (None,) * len(parts) if cache is None else cache
    if isinstance(olds, KeyCache) or not isinstance(olds, tuple) or len(olds) != len(parts):
        raise TypeError(
            f"cache must be None or the tuple of {len(parts)} caches of the step before, got "
            f"{type(olds).__name__}"
        )
    news = []
    for part, old in zip(parts, olds, strict=True):
        x, new = step_module(part, x, old, key_padding_mask)
        news.append(new)
    return x, tuple(news)


def _is_token_wise(module: nn.Module) -> bool:
    if getattr(module, "token_wise", None) is True:
        return True
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return len(module.normalized_shape) == 1 and type(module).__module__.startswith("torch.")
    for cls in _TOKEN_WISE:
        if isinstance(module, cls):
            return type(module).forward is cls.forward
    return False


def select_cache(cache: Cache, index: Tensor) -> Cache:
    """The cache of the samples of an index (b,)."""
    if isinstance(cache, KeyCache):
        padding = None if cache.padding is None else cache.padding[index]
        return KeyCache(cache.keys[index], cache.seen, padding)
    if isinstance(cache, tuple):
        return tuple(select_cache(part, index) for part in cache)
    if cache is None:
        return None
    if isinstance(cache, Tensor):
        return cache[index]
    raise TypeError(f"a cache is made of KeyCache, tensors, tuples and None, got {type(cache).__name__}")
