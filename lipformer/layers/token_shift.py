"""A causal layer without weights that shows each token a part of the one before it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.functional.attention.checks import check_tokens
from lipformer.functional.rounding import ROUND_UP
from lipformer.layers import layout
from lipformer.layers.branch import Call
from lipformer.layers.decoding import register_step
from lipformer.layers.layer import Layer
from lipformer.layers.own_token import register_own_token


class TokenShift(Layer):
    r"""Takes some features of each token from the token before it: :math:`(a_i, b_{i-1})`.

    With tokens :math:`x_i = (a_i, b_i)`, b the last ``shifted`` features, and :math:`b_0 = 0`. A tied
    kernel is symmetric and always prefers the token itself, so that attention alone cannot look one
    back; behind this layer its keys and values know two neighbours, at no cost in the certificate.

    Constant: every entry goes to one place or is lost, so the map is a partial isometry, of constant 1
    in the l2 and linf norms. In the token norm :math:`\|(a_i, b_{i-1})\|^2 \le 2 \max_j \|x_j\|^2`, so
    :math:`\sqrt2`; a token's effect on itself is the projection on a, of norm 1. With all features
    shifted that effect is 0, but 1 is reported all the same: wrappers divide by the bound, and one of 0
    would let a block of mode "causal" enlarge what tokens tell each other without limit.

    Takes tokens batch first, like attention with batch_first=True; a sequence in which the two differ is
    refused by certify and by the wrappers.

    Args:
        dim: D >= 1.
        shifted: number of features from the token before, 0 to D; default half of them.

    Example:
        >>> TokenShift(2)(torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]))
        tensor([[[1., 0.],
                 [3., 2.],
                 [5., 4.]]])
    """

    def __init__(self, dim: int, shifted: int | None = None) -> None:
        super().__init__()
        for name, number in (("dim", dim), ("shifted", 0 if shifted is None else shifted)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise ValueError(f"{name} must be an integer, got {number!r}")
        shifted = dim // 2 if shifted is None else shifted
        if dim < 1 or not 0 <= shifted <= dim:
            raise ValueError(f"need dim >= 1 and 0 <= shifted <= dim, got {dim} and {shifted}")
        self.dim, self.shifted = dim, shifted

    @property
    def batch_first(self) -> bool:
        """True, for good."""
        return True

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """(B, N, D) -> (B, N, D), or (N, D) -> (N, D).

        Args:
            x: tokens.
            key_padding_mask: (B, N) or (N,), True (or -inf) at padded tokens: their successors get
                zeros.
        """
        return self.step(x, None, key_padding_mask)[0]

    def step(
        self, x: Tensor, cache: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The rows of new tokens (B, T, D), and what the next one will be shown, (B, 1, shifted)."""
        check_tokens(x, "x", f"(B, N, {self.dim}) or (N, {self.dim})", min_dim=2)
        if x.ndim > 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x must be (B, N, {self.dim}) or (N, {self.dim}), got {tuple(x.shape)}")
        rows = x.unsqueeze(0) if x.ndim == 2 else x
        own, shown = rows.split([self.dim - self.shifted, self.shifted], dim=-1)
        padding = layout.padding(key_padding_mask, rows)
        if padding is not None:
            shown = shown.masked_fill(padding.unsqueeze(-1), 0.0)
        if cache is None:
            before = F.pad(shown, (0, 0, 1, -1))
        else:
            before = torch.cat([cache.to(shown.dtype), shown[:, :-1]], dim=-2)
        out = torch.cat([own, before], dim=-1)
        return layout.unbatched(out, x, batch_first=True), shown[:, -1:]

    def extra_repr(self) -> str:
        return f"{self.dim}, shifted={self.shifted}"


@register_bound(TokenShift)
def _(module: TokenShift, ask: Ask) -> Bound:
    ask.along(-2)
    if ask.norm == "self":
        # Not 0 with all features shifted: see the class.
        return Bound(1.0, "projection")
    if ask.norm == "token" and 0 < module.shifted < module.dim:
        return Bound(math.sqrt(2.0) * ROUND_UP, "parts of two tokens")
    return Bound(1.0, "partial isometry")


@register_step(TokenShift)
def _(module: TokenShift, x: Tensor, cache: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
    return module.step(x, cache, call.key_padding_mask)


@register_own_token(TokenShift)
def _(module: TokenShift, x: Tensor, tangents: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    kept = tangents[..., : module.dim - module.shifted]
    return module(x, call.key_padding_mask), F.pad(kept, (0, module.shifted))
