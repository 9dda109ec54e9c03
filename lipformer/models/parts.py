"""The parts that the variants put together: attention, feed-forward, blocks, the map to logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lipformer.layers import (
    FeedForward,
    L2MultiheadAttention,
    MaxMin,
    Residual,
    SpectralLinear,
    TokenShift,
    TokenStack,
)
from lipformer.layers.scaled import Scaled
from lipformer.models.config import LanguageModelConfig

RAW_SIZE = 4.0
"""Initial norm of weights that are divided by their norms.

The first functions do not depend on it. But AdamW moves every entry by the learning rate, so that
weights of norm 1 turn by more than a tenth in a step, and their largest singular value outgrows the
others, which division then makes small: after 300 steps the contractive model has 1.463 nats with 4,
1.506 with 1.
"""


def in_attention(config: LanguageModelConfig) -> str | None:
    """The positions that the attention layer itself knows."""
    return config.positions if config.positions in ("alibi", "rotary") else None


def tied_attention(config: LanguageModelConfig, *, orthogonal: bool) -> L2MultiheadAttention:
    """Causal tied L2 attention, for any length or for max_len tokens.

    Args:
        config: the model's.
        orthogonal: orthogonal initial weights, for layers that are divided by their norms: a random
            matrix divided by its norm has a typical gain of 1/2, an orthogonal one of 1. In the lean
            form of the size RAW_SIZE, the same function for it.
    """
    layer = L2MultiheadAttention(
        config.dim,
        config.num_heads,
        dropout=config.dropout,
        batch_first=True,
        value_proj=bool(config.value_proj),
        causal=True,
        positions=in_attention(config),
        max_len=None if config.any_length else config.max_len,
        slopes=config.slopes,
        key_radius=config.key_radius,
        smooth_radius=config.variant == "invertible" and config.key_radius is not None,
    )
    if orthogonal:
        nn.init.orthogonal_(layer.q_proj.weight)
        nn.init.orthogonal_(layer.out_proj.weight, RAW_SIZE)
        enlarge_keys(layer)
    scale_queries(layer.q_proj.weight, config)
    return layer


@torch.no_grad()
def enlarge_keys(layer: L2MultiheadAttention) -> None:
    """RAW_SIZE times the weight of the keys and their radius, at temperatures that make up for it."""
    if layer.log_temperature is not None:
        layer.q_proj.weight.mul_(RAW_SIZE)
        layer.log_temperature.sub_(2.0 * math.log(RAW_SIZE))
        if layer.log_key_radius is not None:
            layer.log_key_radius.add_(math.log(RAW_SIZE))


def shifted(config: LanguageModelConfig, attention: nn.Module) -> nn.Module:
    """The attention behind a TokenShift, where the config wants one."""
    return nn.Sequential(TokenShift(config.dim), attention) if config.token_shift else attention


def gathered(config: LanguageModelConfig) -> list[nn.Module]:
    """What shows each token those before it at the start of the trunk, where the config wants it.

    Embedded symbols are few and span few directions, so that a quarter of the features hold what is
    gathered of each; the embedding learns to lie there.
    """
    count, width = config.gather or 1, max(1, config.dim // 4)
    if count == 1:
        return []
    return [
        SpectralLinear(config.dim, width, bias=False, mode="orthogonal"),
        TokenStack(width, count),
        SpectralLinear(count * width, config.dim, mode="orthogonal"),
        MaxMin(),
    ]


@torch.no_grad()
def scale_queries(weight: Tensor, config: LanguageModelConfig) -> None:
    """Multiplies an initial W_Q by query_scale."""
    weight.mul_(config.query_scale)


def plain_feed_forward(config: LanguageModelConfig) -> FeedForward:
    """The baseline's: GELU between two plain linear layers."""
    return FeedForward(config.dim, _hidden(config), None, activation=nn.GELU(), dropout=config.dropout)


def bounded_feed_forward(config: LanguageModelConfig) -> FeedForward:
    """MaxMin between two layers of orthogonal weights, of constant coeff."""
    return FeedForward(
        config.dim, _hidden(config), config.coeff, dropout=config.dropout, mode="orthogonal"
    )


def _hidden(config: LanguageModelConfig) -> int:
    assert config.hidden is not None
    return config.hidden


def residual_block(config: LanguageModelConfig, branch: nn.Module) -> nn.Module:
    """x + f(x) with LayerNorm before f ("pre"), after the sum ("post") or nowhere ("none")."""
    if config.norm_place == "pre":
        return Residual(nn.Sequential(nn.LayerNorm(config.dim), branch))
    if config.norm_place == "post":
        return nn.Sequential(Residual(branch), nn.LayerNorm(config.dim))
    return Residual(branch)


def readout(config: LanguageModelConfig) -> nn.Sequential:
    """Hidden tokens to logits: LayerNorm where blocks have it before their branches, then linear."""
    head = small(nn.Linear(config.dim, config.vocab_size))
    if config.norm_place == "pre":
        return nn.Sequential(nn.LayerNorm(config.dim), head)
    return nn.Sequential(head)


def bounded_head(config: LanguageModelConfig) -> Scaled:
    """head_coeff times a linear map of norm at most 1.

    Not a linear map of norm at most head_coeff: convex residuals leave small hidden tokens, and an
    optimiser that moves each weight by its learning rate would take long to make logits of them.
    """
    assert config.head_coeff is not None
    head = small(SpectralLinear(config.dim, config.vocab_size), std=0.02 / config.head_coeff)
    return Scaled(head, torch.tensor(float(config.head_coeff)))


@torch.no_grad()
def small(head: nn.Linear, std: float = 0.02) -> nn.Linear:
    """A head whose first predictions are nearly uniform."""
    raw = next(p for p in head.parameters() if p.ndim == 2)
    nn.init.normal_(raw, std=std)
    head.bias.zero_()
    return head


def sinusoids(positions: Tensor, dim: int) -> Tensor:
    r""":math:`\sin(i\,10000^{-2k/D})` and the cosines beside them, (N,) -> (N, D) in float32.

    Source: Vaswani et al. 2017.
    """
    half = (dim + 1) // 2
    exponent = torch.arange(half, device=positions.device, dtype=torch.float64) / half
    angle = positions.double()[:, None] * 10000.0**-exponent
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, :dim].float()
