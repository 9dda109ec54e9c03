"""The next token, drawn from logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_sampling(temperature: float, top_k: int | None, vocab_size: int) -> None:
    """Raises ValueError for a temperature or a top_k that is not allowed."""
    number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    if not number or not 0.0 <= temperature < math.inf:
        raise ValueError(
            f"temperature must be 0 (the likeliest token) or positive and finite, got {temperature!r}"
        )
    if top_k is None:
        return
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k must be None or an integer in 1..{vocab_size}, got {top_k!r}")


def draw(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """One token for each row: (B, V) -> (B, 1).

    Args:
        logits: (B, V).
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among the k likeliest tokens only.
        generator: of the draw.
    """
    if temperature == 0.0 or top_k == 1:
        return logits.argmax(-1, keepdim=True)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # The largest becomes 0: divided by a tiny temperature it stays so, and the others only fall.
    wide = wide - wide.amax(-1, keepdim=True)
    temperature = max(temperature, torch.finfo(wide.dtype).tiny)
    if top_k is None:
        return torch.multinomial((wide / temperature).softmax(-1), 1, generator=generator)
    best, tokens = wide.topk(top_k, dim=-1)
    index = torch.multinomial((best / temperature).softmax(-1), 1, generator=generator)
    return tokens.gather(-1, index)
