"""A causal layer without weights that shows each token a part of the one before it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound


class TokenShift(nn.Module):
    r"""Takes some features of each token from the token before it: :math:`(a_i, b_{i-1})`.

    With tokens :math:`x_i = (a_i, b_i)`, b the last ``shifted`` features, and :math:`b_0 = 0`. A tied
    kernel is symmetric and always prefers the token itself, so that attention alone cannot look one
    back; behind this layer its keys and values know two neighbours, at no cost in the certificate.

    Constant: every entry goes to one place or is lost, so the map is a partial isometry, of constant 1
    in the l2 and linf norms. In the token norm :math:`\|(a_i, b_{i-1})\|^2 \le 2 \max_j \|x_j\|^2`, so
    :math:`\sqrt2`; a token's effect on itself is the projection on a, of norm 1 (0 if all is shifted).

    Args:
        dim: D >= 1.
        shifted: number of features from the token before, 0 to D; default half of them.

    Example:
        >>> TokenShift(2)(torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]))
        tensor([[[1., 0.],
                 [3., 2.],
                 [5., 4.]]])
    """

    causal = True

    def __init__(self, dim: int, shifted: int | None = None) -> None:
        super().__init__()
        shifted = dim // 2 if shifted is None else shifted
        if dim < 1 or not 0 <= shifted <= dim:
            raise ValueError(f"need dim >= 1 and 0 <= shifted <= dim, got {dim} and {shifted}")
        self.dim, self.shifted = dim, shifted

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """(B, N, D) -> (B, N, D).

        Args:
            x: tokens.
            key_padding_mask: bool (B, N), True at padded tokens: their successors get zeros.
        """
        return self.step(x, None, key_padding_mask)[0]

    def step(
        self, x: Tensor, cache: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The rows of new tokens (B, T, D), and what the next one will be shown, (B, 1, shifted)."""
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x must be (B, N, {self.dim}), got {tuple(x.shape)}")
        own, shown = x.split([self.dim - self.shifted, self.shifted], dim=-1)
        if key_padding_mask is not None:
            shown = shown.masked_fill(key_padding_mask[..., None], 0.0)
        if cache is None:
            before = F.pad(shown, (0, 0, 1, 0))
        else:
            before = torch.cat([cache.to(shown.dtype), shown], dim=-2)
        return torch.cat([own, before[:, :-1]], dim=-1), before[:, -1:]

    def extra_repr(self) -> str:
        return f"{self.dim}, shifted={self.shifted}"


@register_bound(TokenShift)
def _(module: TokenShift, ask: Ask) -> Bound:
    if ask.norm == "self":
        return Bound(float(module.shifted < module.dim), "projection")
    if ask.norm == "token" and 0 < module.shifted < module.dim:
        return Bound(math.sqrt(2.0) * (1.0 + 2.0**-52), "parts of two tokens")
    return Bound(1.0, "partial isometry")
