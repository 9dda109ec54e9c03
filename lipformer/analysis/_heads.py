"""Multi-head dot-product attention kept as projections: as quick to apply as the layer it describes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipformer.analysis._maps import AttentionMaps
from lipformer.layers._positions import rotary_angles, rotate


@dataclass(frozen=True, eq=False)
class Heads:
    r"""Pure attention of tokens (rows) x: no residual, no normalisation, no dropout.

    .. math:: S^h_{ij} = s\,(x_i Q_h + q_h) \cdot (x_j K_h + k_h) + B^h_{ij}, \qquad
              f(x)_i = c + \sum_h \sum_j \mathrm{softmax}_j(S^h_{ij})\, (x_j V_h + v_h) O_h

    It is the function of `AttentionMaps` in factors of rank d, the width of a head: a product with its
    Jacobian costs :math:`O(N D^2 + N^2 D)`, not :math:`O(H N D^2 + H N^2 D)`. Without `out` the heads
    are concatenated.

    Attributes:
        query: Q, (H, D, d).
        key: K, (H, D, d).
        value: V, (H, D, e).
        out: O, (H, e, E), or None.
        scale: s.
        query_bias: q, (H, d).
        key_bias: k, (H, d); it matters only with `rotary`.
        value_bias: v, (H, e).
        out_bias: c, (E,); not without `out`.
        causal: token i sees tokens j <= i alone.
        rotary: queries and keys are turned by rotary positions.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor | None
    scale: float
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    out_bias: Tensor | None = None
    causal: bool = False
    rotary: bool = False

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """f(x), (*, N, D) -> (*, N, E).

        Args:
            x: tokens.
            bias: B, added to the logits, broadcastable to (*, H, N, N); -inf where i may not see j.
        """
        q, k = _projected(x, self.query, self.query_bias), _projected(x, self.key, self.key_bias)
        if self.rotary:
            angles = rotary_angles(x.shape[-2], q.shape[-1], 0, x.device)
            q, k = rotate(q, *angles), rotate(k, *angles)
        scores = (self.scale * q) @ k.mT
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        if self.causal:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(ahead, -torch.inf)
        mixed = scores.softmax(-1) @ _projected(x, self.value, self.value_bias)
        if self.out is None:
            return mixed.transpose(-2, -3).flatten(-2)
        result = torch.einsum("...hne,hef->...nf", mixed, self.out)
        return result if self.out_bias is None else result + self.out_bias

    def without_projection(self) -> Heads:
        """The same heads, concatenated instead of projected."""
        return dataclasses.replace(self, out=None, out_bias=None)

    def to(self, dtype: torch.dtype) -> Heads:
        """The same heads in another dtype, detached from the layer's weights."""
        cast: dict[str, Any] = {
            name: part.detach().to(dtype)
            for name, part in vars(self).items()
            if isinstance(part, Tensor)
        }
        return dataclasses.replace(self, **cast)

    def largest_logit(self, x: Tensor) -> float:
        """s max |query| max |key|: the scale of the rounding errors of the logits."""
        q, k = _projected(x, self.query, self.query_bias), _projected(x, self.key, self.key_bias)
        return abs(self.scale) * float(q.norm(dim=-1).amax() * k.norm(dim=-1).amax())

    def constant(self) -> Tensor | None:
        """What every token gets whatever the tokens are, (E,): the biases of values and output."""
        bias = self.value_bias
        if bias is None:
            return self.out_bias
        shift = bias.flatten() if self.out is None else torch.einsum("he,hef->f", bias, self.out)
        return shift if self.out_bias is None else shift + self.out_bias

    def maps(self) -> AttentionMaps:
        """As maps of single tokens in float64, the form that bounds take.

        Raises:
            ValueError: with `rotary`, whose logits are no function of two tokens alone.
        """
        if self.rotary:
            raise ValueError(
                "attention with rotary positions has no AttentionMaps: its logits depend on i - j"
            )
        out = self.out
        if out is None:
            heads, width = self.value.shape[0], self.value.shape[2]
            out = torch.eye(heads * width, dtype=self.value.dtype, device=self.value.device)
            out = out.reshape(heads, width, heads * width)
        return AttentionMaps.from_projections(
            self.query, self.key, self.value, out,
            scale=self.scale, query_bias=self.query_bias, value_bias=self.value_bias,
            out_bias=self.out_bias, causal=self.causal,
        )  # fmt: skip


def _projected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W_h + b_h for each head, (*, N, D) -> (*, H, N, d)."""
    made = torch.einsum("...nd,hde->...hne", x, weight)
    return made if bias is None else made + bias[:, None]
