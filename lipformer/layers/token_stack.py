"""A causal layer that puts each token beside its predecessors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.functional.attention.checks import check_tokens
from lipformer.functional.rounding import ROUND_UP
from lipformer.layers import layout
from lipformer.layers.branch import Call
from lipformer.layers.decoding import register_step
from lipformer.layers.layer import Layer
from lipformer.layers.own_token import register_own_token


class TokenStack(Layer):
    r"""The last K tokens side by side: :math:`y_i = (a_0 x_i, a_1 x_{i-1}, ..., a_{K-1} x_{i-K+1})`.

    With learned :math:`a_k > 0`, :math:`\sum_k a_k^2 \le 1`, the square roots of a softmax, and zeros
    before the first token. Each output token knows K inputs whole, where K - 1 blocks with a
    :class:`TokenShift` would show a part of them, each at the cost of :math:`\sqrt2` in the token norm.

    Constant: :math:`\|y_i\|^2 = \sum_k a_k^2 \|x_{i-k}\|^2 \le \max_j \|x_j\|^2`, so 1 in the token
    norm; summed over i it is 1 in the l2 norm, too. In the linf norm it is :math:`\max_k a_k`, and a
    token's effect on itself :math:`a_0`.

    Takes tokens batch first.

    Args:
        dim: D >= 1.
        count: K >= 1.

    Example:
        >>> TokenStack(1, 2)(torch.tensor([[[1.0], [2.0], [3.0]]])).mul(2.0**0.5).round()
        tensor([[[1., 0.],
                 [2., 1.],
                 [3., 2.]]], grad_fn=<RoundBackward0>)
    """

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        for name, number in (("dim", dim), ("count", count)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} must be a positive integer, got {number!r}")
        self.dim = dim
        self.raw = nn.Parameter(torch.zeros(count))

    @property
    def batch_first(self) -> bool:
        """True, for good."""
        return True

    @property
    def count(self) -> int:
        """K, the number of shares: another one would be multiplied by one share several times."""
        return self.raw.numel()

    @property
    def shares(self) -> Tensor:
        """a, (K,): a little below the root of the softmax, so that rounding leaves the sum below 1."""
        dtype = self.raw.dtype
        wide = self.raw.flatten().to(torch.promote_types(dtype, torch.float32))
        # Not the root of a softmax, which has no gradient at a share that underflows.
        roots = (0.5 * wide.log_softmax(0)).exp()
        return (roots * (1.0 - 1e-6 - torch.finfo(dtype).eps / 2.0)).to(dtype)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """(B, N, D) -> (B, N, K D), or (N, D) -> (N, K D).

        Args:
            x: tokens.
            key_padding_mask: (B, N) or (N,), True (or -inf) at padded tokens: their successors see
                zeros.
        """
        return self.step(x, None, key_padding_mask)[0]

    def step(
        self, x: Tensor, cache: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The rows of new tokens (B, T, D), and the K - 1 tokens that the next one will see."""
        check_tokens(x, "x", f"(B, N, {self.dim}) or (N, {self.dim})", min_dim=2)
        if x.ndim > 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x must be (B, N, {self.dim}) or (N, {self.dim}), got {tuple(x.shape)}")
        rows = x.unsqueeze(0) if x.ndim == 2 else x
        padding = layout.padding(key_padding_mask, rows)
        shown = rows if padding is None else rows.masked_fill(padding.unsqueeze(-1), 0.0)
        before = rows.new_zeros(rows.shape[0], self.count - 1, self.dim) if cache is None else cache
        seen, new = torch.cat([before.to(rows.dtype), shown], dim=-2), rows.shape[-2]
        parts = [rows, *(seen[:, k : k + new] for k in range(self.count - 2, -1, -1))]
        out = (torch.stack(parts, dim=-2) * self.shares[:, None]).to(rows.dtype)
        return layout.unbatched(out.flatten(-2), x, batch_first=True), seen[:, new:]

    def extra_repr(self) -> str:
        return f"{self.dim}, count={self.count}"


@register_bound(TokenStack)
def _(module: TokenStack, ask: Ask) -> Bound:
    ask.along(-2)
    shares = module.shares.double()
    if ask.norm == "self":
        return Bound(shares[0] * ROUND_UP, "share of the token itself")
    value = shares.amax() if ask.norm == "linf" else torch.linalg.vector_norm(shares)
    return Bound(value * ROUND_UP, "shares of several tokens")


@register_step(TokenStack)
def _(module: TokenStack, x: Tensor, cache: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
    return module.step(x, cache, call.key_padding_mask)


@register_own_token(TokenStack)
def _(module: TokenStack, x: Tensor, tangents: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    own = F.pad(module.shares[0] * tangents, (0, (module.count - 1) * module.dim))
    return module(x, call.key_padding_mask), own
