"""Self-attention with weights of its own for queries, keys and values that has a Lipschitz constant."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.functional import l2_gain, null_key_attention
from lipformer.functional.rounding import running
from lipformer.layers import layout
from lipformer.layers.attention import masks
from lipformer.layers.attention.bound import (
    above_floor,
    asked_length,
    head_norms,
    joint_bound_minimum,
    token_bound_minimum,
)
from lipformer.layers.attention.key_cache import KeyCache, extend
from lipformer.layers.attention.self_attention import SelfAttention, check_settings
from lipformer.layers.branch import Call
from lipformer.layers.constants import Constants
from lipformer.layers.decoding import register_step


class NullKeyAttention(SelfAttention):
    r"""Multi-head self-attention with logits :math:`-t_h (\|q_i - k_j\|^2 + \epsilon_h^2 \|v_j\|^2)`.

    .. math:: F(X) = \sum_h g(X W^Q_h + b_h, X W^K_h, X W^V_h + c_h) W^O_h + b

    with g of :func:`lipformer.functional.null_key_attention`: each query also sees itself, as a null key
    of value zero and logit 0. Called like nn.MultiheadAttention for self-attention, of which it has the
    four matrices, so that it starts and learns near dot-product attention. The price is a certificate
    larger by about :math:`1/\epsilon` than that of :class:`L2MultiheadAttention`.

    Constant (Theorem U): with N tokens a head is a part of tied L2 attention of 2N points of which each
    sees, and is seen by, at most N + 1, under any mask. With the gain G of that,

    .. math:: \|F\| \le G \,\|[W^Q_h, W^K_h, \epsilon_h W^V_h]_h\|\;
        \|\mathrm{stack}_h(W^O_h / \epsilon_h)\|

    Args:
        embed_dim: D, the width of the tokens.
        num_heads: H; D must be a multiple of it.
        dropout: probability of dropping an attention weight in training.
        bias: learned biases. (One of the keys would move what that of the queries moves.)
        batch_first: input (B, N, D) rather than (N, B, D).
        causal: always mask later keys; else each call decides.
        max_len: the largest number of tokens, certify then needs no seq_len.
        device: of the parameters.
        dtype: of the parameters.

    Example:
        >>> import lipformer as lf
        >>> layer = NullKeyAttention(16, 4, batch_first=True)
        >>> x = torch.randn(2, 10, 16)
        >>> layer(x)[0].shape, lf.certify(layer, seq_len=10).bound > 0
        (torch.Size([2, 10, 16]), True)
    """

    any_mask = True
    window = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
        *,
        causal: bool = False,
        max_len: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_settings(embed_dim, num_heads, dropout, max_len, batch_first=batch_first, causal=causal)
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.batch_first, self.causal, self.max_len = batch_first, causal, max_len
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias, **place)
        self.k_proj = nn.Linear(embed_dim, embed_dim, False, **place)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias, **place)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, **place)
        self.log_temperature = nn.Parameter(torch.empty(num_heads, **place))
        self.log_value_scale = nn.Parameter(torch.empty(num_heads, **place))
        self.constants = Constants()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        r"""Initial weights, with temperatures of :math:`1/d` and :math:`\epsilon = 1`."""
        for name in self.projections:
            linear: Any = self._modules[name]
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                linear.bias.zero_()
        self.log_temperature.fill_(-math.log(self.head_dim))
        self.log_value_scale.zero_()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Self-attention; arguments and results as in nn.MultiheadAttention, without weights.

        Args:
            query: (N, B, D), (B, N, D) if batch_first, or (N, D).
            key: the same tensor as query, or None.
            value: the same tensor as query, or None.
            key_padding_mask: (B, N) or (N,), True (or -inf) at padded tokens; their output is the bias.
            need_weights: must be False: part of the weights is that of the null key.
            attn_mask: (N, N) or (B H, N, N), bool with True at hidden keys, or numbers <= 0 to add to
                the logits. Any keys may be hidden, a token's own too.
            average_attn_weights: without effect.
            is_causal: mask later keys, beside those that attn_mask hides.
        """
        if need_weights:
            raise ValueError("NullKeyAttention gives no weights, got need_weights=True")
        self._one_tensor(query, key, value)
        x, padding = self._batched(query, key_padding_mask)
        bias: Tensor | None = None
        if attn_mask is not None:
            bias = masks.additive(attn_mask, x.shape[0], self.num_heads, x.shape[1], x.dtype)
        causal = self.causal or is_causal
        out = self._output(self._attend(x, self.new_keys(x), padding, causal, bias), padding)
        return layout.unbatched(out, query, self.batch_first), None

    def step(
        self, x: Tensor, cache: KeyCache | None = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, KeyCache]:
        """Causal attention of new tokens over all tokens so far, for step-by-step decoding.

        Args:
            x: new tokens (B, T, D), or (T, B, D) unless batch_first.
            cache: what the step before returned, None at the first.
            key_padding_mask: (B, T) of the new tokens.

        Returns:
            The rows of the new tokens, as the full pass would give them, and the new cache.
        """
        rows, padding = self._batched(x, key_padding_mask)
        cache = extend(cache, self.new_keys(rows), padding)
        if self.max_len is not None and cache.seen > self.max_len:
            raise ValueError(f"max_len is {self.max_len}, got {cache.seen} tokens, cached and new")
        out = self._output(self._attend(rows, cache.keys, cache.padding, True, None), padding)
        return layout.unbatched(out, x, self.batch_first), cache

    @property
    def key_width(self) -> int:
        """Features of a head that a cache keeps of a token: its key and its value."""
        return 2 * self.head_dim

    def new_keys(self, x: Tensor) -> Tensor:
        """Keys and values of tokens (B, T, D), side by side, (B, H, T, 2 d)."""
        self.check_projections()
        value = F.linear(x, self.v_proj.weight, self.v_proj.bias)
        return torch.cat([self._scaled_heads(x, self.k_proj), self._heads(value)], dim=-1)

    def _heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "b n (h d) -> b h n d", h=self.num_heads)

    def _scaled_heads(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """Queries or keys (B, H, T, d) times sqrt(2 t_h)."""
        bias: Tensor | None = linear.bias
        bias = None if bias is None else self._scaled(bias)
        return self._heads(F.linear(x, self._scaled(linear.weight), bias))

    def _attend(
        self, x: Tensor, keys: Tensor, padding: Tensor | None, causal: bool, bias: Tensor | None
    ) -> Tensor:
        key, value = keys.chunk(2, -1)
        return null_key_attention(
            self._scaled_heads(x, self.q_proj),
            key,
            value,
            scale=0.5,
            value_scale=self.value_scale(),
            is_causal=causal,
            bias=bias,
            key_padding_mask=padding,
            dropout_p=self.dropout if self.training else 0.0,
        )

    def _output(self, heads: Tensor, padding: Tensor | None) -> Tensor:
        """Heads (B, H, T, d) to the output (B, T, D)."""
        rows = layout.without_padding(rearrange(heads, "b h n d -> b n (h d)"), padding)
        return F.linear(rows, self.out_proj.weight, self.out_proj.bias)

    def root(self) -> Tensor:
        """sqrt(2 t_h), (H, 1, 1), in at least float32: folded into the weights of queries and keys."""
        return (0.5 * (self.log_temperature.to(self._wide()) + math.log(2.0))).exp()[:, None, None]

    def value_scale(self) -> Tensor:
        r""":math:`\sqrt{2 t_h} \epsilon_h`, (H, 1, 1), in at least float32."""
        return self.root() * self.log_value_scale.to(self._wide()).exp()[:, None, None]

    def _scaled(self, weight: Tensor) -> Tensor:
        """A weight (H d, D) or bias (H d,) times sqrt(2 t_h), in its own dtype."""
        rows = weight.reshape(self.num_heads, self.head_dim, -1)
        return (rows * self.root()).to(weight.dtype).reshape(weight.shape)

    def extra_repr(self) -> str:
        dropout = f", dropout={self.dropout}" if self.dropout else ""
        return (
            f"{self.embed_dim}, {self.num_heads}, causal={self.causal}, max_len={self.max_len}{dropout}"
        )


@register_bound(NullKeyAttention)
def _(layer: NullKeyAttention, ask: Ask) -> Bound:
    layer.check_projections(ask.refuse)
    ask.along(-2 if layer.batch_first else 0)
    if layer.training and layer.dropout > 0 and not ask.in_forward:
        raise ask.refuse(
            f"attention dropout of {layer.dropout} is random in training mode",
            "model.eval() before certify, or dropout=0",
        )
    if ask.norm == "linf":
        raise ask.refuse("Theorem U is known in norms of whole tokens", "norm='l2' or 'token'")
    if ask.norm == "self" and not layer.causal:
        raise ask.refuse("the self norm needs a causal layer", "causal=True, or norm='l2' or 'token'")
    n = asked_length(layer, ask)
    if n is None:
        raise ask.refuse(
            "the gain of attention grows with the number of tokens, and none was given",
            "seq_len=N, or a layer with max_len=N",
        )
    scale = layer.value_scale()
    if ask.readable(scale) and not bool(((scale > 0) & torch.isfinite(scale)).all()):
        raise ask.refuse(
            f"its temperatures and scales leave the range of {scale.dtype}: {layer.log_temperature}, "
            f"{layer.log_value_scale}",
            "numbers between -80 and 80",
        )
    cast = (lambda w: w) if ask.in_forward else running
    weights = layer._scaled(layer.q_proj.weight), layer._scaled(layer.k_proj.weight), layer.v_proj.weight
    q, k, v = (rearrange(cast(w).double(), "(h d) i -> h d i", h=layer.num_heads) for w in weights)
    m = rearrange(cast(layer.out_proj.weight).double(), "o (h d) -> h d o", h=layer.num_heads)
    points, m = torch.cat([k, scale.double() * v], dim=1), m / scale.double()
    if ask.norm == "l2":
        gain = l2_gain(n + 1, theorem="any mask")
        gains = layer.constants((gain,) * layer.num_heads, q.device)
        value = joint_bound_minimum(torch.cat([q, points], dim=1), m, gains)
        return Bound(above_floor(value, points, m), "Theorem U")
    # A token moves its query by one norm and its key and value by the other: the larger one counts. Its
    # effect on itself is one of those that the token norm has.
    gains = layer.constants((l2_gain(n + 1, norm="token"),) * layer.num_heads, q.device)
    own = torch.maximum(head_norms(q), head_norms(points))
    return Bound(above_floor(token_bound_minimum(own, m, gains), points, m), "Theorem U")


@register_step(NullKeyAttention)
def _(layer: NullKeyAttention, x: Tensor, cache: KeyCache | None, call: Call) -> tuple[Tensor, KeyCache]:
    if not layer.causal:
        raise ValueError(f"step needs attention built with causal=True, got {layer.causal}")
    return layer.step(x, cache, call.key_padding_mask)
