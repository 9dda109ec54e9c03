"""Self-attention without a causal mask: dot products that local analysis can take apart, and L2."""

from __future__ import annotations

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.functional.attention.maps import AttentionMaps
from lipformer.layers import L2MultiheadAttention, SpectralLinear
from lipformer.layers.layer import Layer
from lipformer.layers.layout import padding


class DotProductSelfAttention(Layer):
    r"""Unmasked dot-product self-attention: logits :math:`q_i \cdot k_j / \sqrt d`, by torch's SDPA.

    It has no global Lipschitz constant. Around an input LoFAST bounds it, the better the smaller the
    weights are; hence the two coefficients. Source: Vaswani et al. 2017.

    Args:
        dim: D.
        num_heads: H, a divisor of D.
        logit_coeff: if given, query and key weights have spectral norm at most this.
        value_coeff: if given, value and output weights have spectral norm at most this.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> layer, x = DotProductSelfAttention(16, 4), torch.randn(2, 10, 16)
        >>> torch.allclose(layer(x), layer.attention_maps()(x), atol=1e-5)
        True
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        logit_coeff: float | None = None,
        value_coeff: float | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads

        def linear(coeff: float | None, bias: bool) -> nn.Linear:
            if coeff is not None:
                return SpectralLinear(dim, dim, bias, coeff=coeff)
            layer = nn.Linear(dim, dim, bias)
            nn.init.xavier_uniform_(layer.weight)
            if bias:
                nn.init.zeros_(layer.bias)
            return layer

        self.q_proj = linear(logit_coeff, True)
        # A key's bias adds a constant to each row of logits, which softmax ignores.
        self.k_proj = linear(logit_coeff, False)
        self.v_proj = linear(value_coeff, False)
        self.out_proj = linear(value_coeff, True)

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.q_proj.out_features // self.num_heads

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """(*, N, D) -> (*, N, D), or (B, N, D) with a mask (B, N) that is True at padded tokens."""
        q, k, v = (
            rearrange(layer(x), "... n (h d) -> ... h n d", h=self.num_heads)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        hidden = padding(key_padding_mask, x)
        seen = None if hidden is None else ~hidden[:, None, None]
        heads = F.scaled_dot_product_attention(q, k, v, seen)
        return self.out_proj(rearrange(heads, "... h n d -> ... n (h d)"))

    def attention_maps(self) -> AttentionMaps:
        """Its maps of single tokens, from the weights as they are now."""
        q, k, v = (
            rearrange(layer.weight, "(h d) i -> h i d", h=self.num_heads)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return AttentionMaps.from_projections(
            q,
            k,
            v,
            rearrange(self.out_proj.weight, "o (h d) -> h d o", h=self.num_heads),
            scale=float(self.head_dim**-0.5),
            query_bias=rearrange(self.q_proj.bias, "(h d) -> h d", h=self.num_heads),
            out_bias=self.out_proj.bias,
        )

    def extra_repr(self) -> str:
        return f"{self.num_heads} heads"


@register_bound(DotProductSelfAttention)
def _(module: DotProductSelfAttention, ask: Ask) -> Bound:
    raise ask.refuse(
        "dot-product attention has no finite Lipschitz constant (Kim et al. 2021)",
        "lipformer.analysis.certified_radius(model, images, labels), which bounds it around each image, "
        "or the variant 'l2'",
    )


def l2_self_attention(
    dim: int, num_heads: int, tokens: int, key_radius: float | None
) -> L2MultiheadAttention:
    """L2 attention of at most so many tokens, to be divided by its bound.

    A random matrix divided by its norm has a typical gain of 1/2, an orthogonal one of 1: weights begin
    orthogonal.
    """
    attention = L2MultiheadAttention(
        dim, num_heads, batch_first=True, causal=False, max_len=tokens, key_radius=key_radius
    )
    nn.init.orthogonal_(attention.q_proj.weight)
    nn.init.orthogonal_(attention.out_proj.weight)
    return attention
