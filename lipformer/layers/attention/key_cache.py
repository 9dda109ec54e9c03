"""The cache of step-by-step decoding: keys only, half the memory of a key-value cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class KeyCache(NamedTuple):
    """Cache of a causal L2 attention layer: the keys of the tokens seen so far.

    A key is the projected token; the value of a token is a linear function of its key, so there is
    nothing else to store.

    Attributes:
        keys: (B, H, T, d), T at most window - 1 in a layer with a window.
        seen: number of tokens seen, those that left the window included.
        padding: (B, T) bool, True at padded tokens, or None.
    """

    keys: Tensor
    seen: int
    padding: Tensor | None = None

    def latest(self, count: int) -> KeyCache:
        """The cache cut to its ``count`` latest keys."""
        start = max(0, self.keys.shape[-2] - count)
        padding = None if self.padding is None else self.padding[:, start:]
        return KeyCache(self.keys[..., start:, :], self.seen, padding)


def extend(cache: KeyCache | None, keys: Tensor, padding: Tensor | None) -> KeyCache:
    """The cache with new keys (B, H, T', d) and their padding (B, T') appended."""
    if cache is None:
        return KeyCache(keys, keys.shape[-2], padding)
    if not isinstance(cache, KeyCache):
        raise TypeError(
            f"cache must be None or the KeyCache of the step before, got {type(cache).__name__}"
        )
    if cache.keys.shape[0] != keys.shape[0]:
        raise ValueError(
            f"the cache holds a batch of {cache.keys.shape[0]}, the new tokens are a batch of "
            f"{keys.shape[0]}; one new token per sample has shape (B, 1, D)"
        )
    if padding is not None or cache.padding is not None:
        old = _or_valid(cache.padding, cache.keys)
        padding = torch.cat([old, _or_valid(padding, keys)], dim=-1)
    joined = torch.cat([cache.keys, keys], dim=-2)
    return KeyCache(joined, cache.seen + keys.shape[-2], padding)


def _or_valid(padding: Tensor | None, keys: Tensor) -> Tensor:
    if padding is not None:
        return padding
    return torch.zeros(keys.shape[0], keys.shape[-2], dtype=torch.bool, device=keys.device)
