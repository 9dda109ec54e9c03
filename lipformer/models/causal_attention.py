"""Attention with a key and a value of its own for every token, for comparison: no constant known."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.functional.attention.untied import untied_operands
from lipformer.layers.attention.positions import exact_slopes, rotary_angles, rotate
from lipformer.layers.branch import Call
from lipformer.layers.constants import Constants
from lipformer.layers.decoding import register_step

# Keys and values (B, H, T, d) of the tokens seen so far.
KeyValueCache = tuple[Tensor, Tensor]


def alibi_slopes(heads: int) -> tuple[float, ...]:
    r"""ALiBi's slopes :math:`2^{-8h/H}`, h = 1..H: 1/4, 1/16, 1/64, 1/256 (Press et al. 2022)."""
    return tuple(2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads))


def causal_bias(slopes: Tensor | None, queries: int, keys: int, like: Tensor) -> Tensor:
    """ALiBi and the causal mask for the last ``queries`` of ``keys`` tokens.

    Args:
        slopes: (H,), or None for the mask alone.
        queries: number of rows.
        keys: number of columns.
        like: gives dtype and device.

    Returns:
        (1, H, queries, keys) with -s (i - j), -inf for later keys; without slopes (queries, keys), bool.
    """
    column = torch.arange(keys, device=like.device)
    ahead = column - column[keys - queries :, None]
    if slopes is None:
        return ahead <= 0
    wide = torch.promote_types(like.dtype, torch.float32)
    bias = slopes.to(wide)[:, None, None] * ahead
    return bias.masked_fill(ahead > 0, -math.inf).to(like.dtype).unsqueeze(0)


class CausalAttention(nn.Module, ABC):
    """Causal self-attention with one projection to queries, keys and values, on torch's SDPA.

    A subclass gives the kernel's operands. It has no Lipschitz constant, and :func:`lipformer.certify`
    says so.

    Args:
        dim: D.
        num_heads: H.
        positions: "alibi", "rotary" or None.
        slopes: ALiBi slopes, one per head; default 1/4 to 1/256 for four heads.
        dropout: of the attention weights.
    """

    causal = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        positions: str | None = "alibi",
        slopes: Sequence[float] | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if dim % (2 * num_heads if positions == "rotary" else num_heads):
            raise ValueError(
                "dim must be a multiple of num_heads, twice that with positions='rotary', got "
                f"{dim} and {num_heads}"
            )
        if positions not in ("alibi", "rotary", None) or (slopes is not None and positions != "alibi"):
            raise ValueError(
                "positions must be 'alibi', 'rotary' or None, and slopes need positions='alibi', got "
                f"positions={positions!r}, slopes={slopes!r}"
            )
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.positions = positions
        self.dropout = dropout
        self._constants = Constants()
        self.slopes: tuple[float, ...] | None = None
        if positions == "alibi":
            given = alibi_slopes(num_heads) if slopes is None else slopes
            self.slopes = exact_slopes(given, num_heads)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Glorot weights for each of the four maps, zero biases."""
        for weight in (*self.qkv.weight.chunk(3), self.out.weight):
            nn.init.xavier_uniform_(weight)
        self.qkv.bias.zero_()
        self.out.bias.zero_()

    @abstractmethod
    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value (B, H, N, E) whose plain dot products are the logits; E >= d.

        The first d columns of the kernel's output are the layer's.
        """

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        return self._attend(x, None)[0]

    def step(
        self, x: Tensor, cache: KeyValueCache | None = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, KeyValueCache]:
        """The rows of new tokens (B, T, D), and the keys and values of all tokens so far."""
        if key_padding_mask is not None:
            raise ValueError(f"{type(self).__name__} takes no padding, got a key_padding_mask")
        return self._attend(x, cache)

    def _attend(self, x: Tensor, cache: KeyValueCache | None) -> tuple[Tensor, KeyValueCache]:
        q, k, v = rearrange(self.qkv(x), "b n (p h d) -> p b h n d", p=3, h=self.num_heads)
        seen = 0 if cache is None else cache[0].shape[-2]
        if self.positions == "rotary":
            angles = rotary_angles(x.shape[-2], self.head_dim, seen, x.device)
            q, k = rotate(q, *angles), rotate(k, *angles)
        if cache is not None:
            k, v = torch.cat([cache[0], k], dim=-2), torch.cat([cache[1], v], dim=-2)
        query, key, value = self.operands(q, k, v)
        bias: Tensor | None = None
        if self.slopes is not None:
            slopes = self._constants(self.slopes, x.device, torch.float32)
            bias = causal_bias(slopes, q.shape[-2], k.shape[-2], query)
        elif seen > 0:
            bias = causal_bias(None, q.shape[-2], k.shape[-2], query)
        heads = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=bias,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=bias is None,
            scale=1.0,
        )
        return self.out(rearrange(heads[..., : self.head_dim], "b h n d -> b n (h d)")), (k, v)

    def extra_repr(self) -> str:
        return f"{self.num_heads} heads, positions={self.positions!r}, dropout={self.dropout}"


def _step(
    module: CausalAttention, x: Tensor, cache: KeyValueCache | None, call: Call
) -> tuple[Tensor, KeyValueCache]:
    return module.step(x, cache, call.key_padding_mask)


class DotProductAttention(CausalAttention):
    r"""Causal dot-product attention: logits :math:`q_i \cdot k_j / \sqrt d` (Vaswani et al. 2017).

    Example:
        >>> _ = torch.manual_seed(0)
        >>> DotProductAttention(16, 4)(torch.randn(2, 10, 16)).shape
        torch.Size([2, 10, 16])
    """

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q / sqrt(d), k and v."""
        return q * self.head_dim**-0.5, k, v


class UntiedL2Attention(CausalAttention):
    r"""Causal L2 attention with untied weights: logits :math:`-t \|x_i W_Q - x_j W_K\|^2`.

    Values are :math:`x_j W_V`. It has no finite Lipschitz constant: for one, query and key must be tied
    and the values linear in the keys (docs/theory, section 1). One temperature t per head is learned.
    Source: the untied comparison of Kim, Papamakarios, Mnih 2021.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> UntiedL2Attention(16, 4)(torch.randn(2, 10, 16)).shape
        torch.Size([2, 10, 16])
    """

    def __init__(self, dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(dim, num_heads, **options)
        spread = torch.linspace(-1.5, 1.5, num_heads) if num_heads > 1 else torch.zeros(1)
        self.log_temperature = nn.Parameter(spread - math.log(self.head_dim))

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :func:`untied_operands`."""
        return untied_operands(q, k, v, self.log_temperature.exp()[:, None, None])


def _refuse(module: CausalAttention, ask: Ask) -> Bound:
    kind = "dot-product" if isinstance(module, DotProductAttention) else "untied L2"
    raise ask.refuse(
        f"{kind} attention has no finite Lipschitz constant (Kim et al. 2021)",
        "lipformer.L2MultiheadAttention, or the variants 'l2', 'contractive', 'lipschitz'",
    )


for _class in (DotProductAttention, UntiedL2Attention):
    register_bound(_class)(_refuse)
    register_step(_class)(_step)
