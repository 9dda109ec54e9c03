"""Invertible blocks that the tests of inverses share."""

from __future__ import annotations

from typing import Any

from torch import nn

import lipformer as lf

FORMS: dict[str, dict[str, Any]] = {
    "attention": {},
    "paper": {"value_proj": True},
    "rotary window": {"value_proj": True, "window": 4, "positions": "rotary"},
    "alibi": {"value_proj": True, "positions": "alibi"},
    "sequence": {"value_proj": True},
}


def branch(name: str, dim: int = 8, causal: bool = False, **options: Any) -> nn.Module:
    """Attention in one of its forms, a feed-forward part, or both with a smooth activation between."""
    feed_forward = lf.FeedForward(dim, 2 * dim)
    if name == "feed-forward":
        return feed_forward
    given = {"value_proj": False, "max_len": 256, **FORMS[name], **options}
    attention = lf.L2MultiheadAttention(dim, 2, batch_first=True, causal=causal, **given)
    return nn.Sequential(attention, nn.Tanh(), feed_forward) if name == "sequence" else attention


def block(name: str, coeff: float = 0.9, mode: str = "norm", **options: Any) -> lf.InvertibleResidual:
    """The branch made invertible, in eval mode."""
    return lf.InvertibleResidual(branch(name, causal=mode == "causal"), coeff, mode, **options).eval()
