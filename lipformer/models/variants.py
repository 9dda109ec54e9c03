"""One builder for each variant: which parts make its trunk and its readout."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from lipformer.flows import ActNorm, InvertibleResidual
from lipformer.layers import CenterNorm, Contractive, ConvexResidual, PastBias
from lipformer.models import parts
from lipformer.models.causal_attention import CausalAttention, DotProductAttention, UntiedL2Attention
from lipformer.models.config import LanguageModelConfig


class Body(NamedTuple):
    """The two halves of a model's body.

    Attributes:
        trunk: embedded tokens to hidden tokens, (B, N, D) -> (B, N, D).
        readout: hidden tokens to logits, (B, N, D) -> (B, N, V).
    """

    trunk: nn.Sequential
    readout: nn.Sequential


def _transformer(
    config: LanguageModelConfig,
    attention: Callable[[LanguageModelConfig], nn.Module],
) -> Body:
    """Blocks of an attention and the baseline's feed-forward part."""
    blocks: list[nn.Module] = []
    for _ in range(config.num_layers):
        blocks.append(parts.residual_block(config, parts.shifted(config, attention(config))))
        blocks.append(parts.residual_block(config, parts.plain_feed_forward(config)))
    return Body(nn.Sequential(*blocks), parts.readout(config))


def _untied(kind: type[CausalAttention]) -> Callable[[LanguageModelConfig], nn.Module]:
    def attention(config: LanguageModelConfig) -> nn.Module:
        layer = kind(
            config.dim,
            config.num_heads,
            positions=parts.in_attention(config),
            slopes=config.slopes,
            dropout=config.dropout,
        )
        parts.scale_queries(layer.qkv.weight[: config.dim], config)
        return layer

    return attention


def _tied(config: LanguageModelConfig) -> nn.Module:
    return parts.tied_attention(config, orthogonal=False)


def _contractive(config: LanguageModelConfig) -> Contractive:
    """Tied attention divided by its bound; the paper's own scaling keeps the paper's weights."""
    assert config.coeff is not None
    attention = parts.tied_attention(config, orthogonal=config.bound is None)
    return Contractive(attention, config.coeff, norm=config.norm)


def _build_lipschitz(config: LanguageModelConfig) -> Body:
    def block(branch: nn.Module, weight: float | None) -> nn.Module:
        assert weight is not None
        if config.norm_place == "pre":
            branch = nn.Sequential(CenterNorm(config.dim), branch)
        return ConvexResidual(branch, weight)

    blocks = parts.gathered(config)
    for _ in range(config.num_layers):
        blocks += [
            block(parts.shifted(config, _contractive(config)), config.attention_weight),
            block(parts.bounded_feed_forward(config), config.feed_forward_weight),
        ]
    return Body(nn.Sequential(*blocks), nn.Sequential(parts.bounded_head(config)))


def _build_invertible(config: LanguageModelConfig) -> Body:
    assert config.coeff is not None
    causal = config.norm == "self"
    blocks: list[nn.Module] = []
    for _ in range(config.num_layers):
        if config.past_bias:
            # What earlier tokens add to one does not count for its own effect on itself: no division.
            past = parts.shifted(config, parts.tied_attention(config, orthogonal=False))
            branch = nn.Sequential(PastBias(config.dim, past), parts.bounded_feed_forward(config))
            blocks += [InvertibleResidual(branch, config.coeff, mode="causal"), ActNorm(config.dim)]
            continue
        attention = parts.shifted(config, parts.tied_attention(config, orthogonal=True))
        if causal:
            blocks.append(InvertibleResidual(attention, config.coeff, mode="causal"))
        else:
            blocks.append(InvertibleResidual(attention, config.coeff, norm=config.norm))
        blocks.append(ActNorm(config.dim))
        feed_forward = parts.bounded_feed_forward(config)
        norm = "l2" if causal else config.norm
        blocks += [InvertibleResidual(feed_forward, config.coeff, norm=norm), ActNorm(config.dim)]
    return Body(nn.Sequential(*blocks), parts.readout(config))


BODIES: dict[str, Callable[[LanguageModelConfig], Body]] = {
    "dot_product": lambda config: _transformer(config, _untied(DotProductAttention)),
    "l2_untied": lambda config: _transformer(config, _untied(UntiedL2Attention)),
    "l2": lambda config: _transformer(config, _tied),
    "contractive": lambda config: _transformer(config, _contractive),
    "lipschitz": _build_lipschitz,
    "invertible": _build_invertible,
}
