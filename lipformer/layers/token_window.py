"""Causal layers that show each token some of those before it."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

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


class TokenWindow(Layer):
    """A linear map of each token and of some before it, zeros before the first.

    Takes tokens batch first; a sequence with attention that does not is refused.

    Args:
        dim: D >= 1.
        **others: further positive integers.
    """

    def __init__(self, dim: int, **others: int) -> None:
        super().__init__()
        for name, number in {"dim": dim, **others}.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} must be a positive integer, got {number!r}")
        self.dim = dim

    @abstractmethod
    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """What tokens (B, T, D) keep for themselves, what is shown, (B, T, w), and L, to how many."""

    @abstractmethod
    def rows(self, own: Tensor, before: Tensor) -> Tensor:
        """The output, of what tokens keep and of what is shown, (B, L + T - 1, w): not the last."""

    @property
    def batch_first(self) -> bool:
        """True, for good."""
        return True

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """(B, N, D) -> (B, N, out), or (N, D) -> (N, out).

        Args:
            x: tokens.
            key_padding_mask: (B, N) or (N,), True (or -inf) at padded tokens: their successors see
                zeros.
        """
        return self._pass(x, None, key_padding_mask)[0]

    def step(
        self, x: Tensor, cache: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The rows of new tokens (B, T, D), and what the next ones will be shown, (B, L, w)."""
        out, before, shown = self._pass(x, cache, key_padding_mask)
        return out, torch.cat([before, shown[:, -1:]], dim=-2)[:, shown.shape[-2] :]

    def _pass(
        self, x: Tensor, cache: Tensor | None, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        check_tokens(x, "x", f"(B, N, {self.dim}) or (N, {self.dim})", min_dim=2)
        if x.ndim > 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x must be (B, N, {self.dim}) or (N, {self.dim}), got {tuple(x.shape)}")
        tokens = x.unsqueeze(0) if x.ndim == 2 else x
        own, shown, last = self.parts(tokens)
        shown = layout.without_padding(shown, layout.padding(key_padding_mask, tokens))
        shape = (len(tokens), last, shown.shape[-1])
        if cache is None:
            before = F.pad(shown, (0, 0, last, -1))
        elif isinstance(cache, Tensor) and cache.shape == shape:
            before = torch.cat([cache.to(shown.dtype), shown[:, :-1]], dim=-2)
        else:
            got = tuple(cache.shape) if isinstance(cache, Tensor) else type(cache).__name__
            raise ValueError(f"cache must be None or the tensor {shape} of the step before, got {got}")
        return layout.unbatched(self.rows(own, before), x, batch_first=True), before, shown


class TokenShift(TokenWindow):
    r"""Takes some features of each token from the previous token: :math:`(a_i, b_{i-1})`.

    With tokens :math:`x_i = (a_i, b_i)`, b the last ``shifted`` features, and :math:`b_0 = 0`. A tied
    kernel is symmetric and always prefers the token itself, so attention alone cannot single out the
    previous token; after this layer keys and values contain both tokens, and the bound does not grow.

    Constant: every entry goes to one place or is lost, so the map is a partial isometry, of constant 1
    in the l2 and linf norms. In the token norm :math:`\|(a_i, b_{i-1})\|^2 \le 2 \max_j \|x_j\|^2`, so
    :math:`\sqrt2`; a token's effect on itself is the projection on a, of norm 1. With all features
    shifted that effect is 0, but the bound is still 1: wrappers divide by the bound, and with 0 a block
    of mode "causal" could enlarge the effect of tokens on each other without limit.

    Args:
        dim: D >= 1.
        shifted: number of features from the previous token, 0 to D; default half of them.

    Example:
        >>> TokenShift(2)(torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]))
        tensor([[[1., 0.],
                 [3., 2.],
                 [5., 4.]]])
    """

    def __init__(self, dim: int, shifted: int | None = None) -> None:
        super().__init__(dim)
        self.shifted = dim // 2 if shifted is None else shifted

    def __setattr__(self, name: str, value: Any) -> None:
        # Read when the layer runs and when it is certified: a number set later must be one, too.
        if name == "shifted" and (type(value) is not int or not 0 <= value <= self.dim):
            raise ValueError(f"need integers dim >= shifted >= 0, got {self.dim} and {value!r}")
        super().__setattr__(name, value)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """a and b."""
        own, shown = x.split([self.dim - self.shifted, self.shifted], dim=-1)
        return own, shown, 1

    def rows(self, own: Tensor, before: Tensor) -> Tensor:
        """Side by side."""
        return torch.cat([own, before], dim=-1)

    def extra_repr(self) -> str:
        return f"{self.dim}, shifted={self.shifted}"


class TokenStack(TokenWindow):
    r"""The last K tokens side by side: :math:`y_i = (a_0 x_i, a_1 x_{i-1}, ..., a_{K-1} x_{i-K+1})`.

    With learned :math:`a_k > 0`, :math:`\sum_k a_k^2 \le 1`, the square roots of a softmax, and zeros
    before the first token. Each output token knows K inputs whole, where K - 1 blocks with a
    :class:`TokenShift` would show a part of them, each at the cost of :math:`\sqrt2` in the token norm.

    Constant: :math:`\|y_i\|^2 = \sum_k a_k^2 \|x_{i-k}\|^2 \le \max_j \|x_j\|^2`, so 1 in the token
    norm; summed over i it is 1 in the l2 norm, too. In the linf norm it is :math:`\max_k a_k`, and a
    token's effect on itself :math:`a_0`.

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
        super().__init__(dim, count=count)
        self.raw = nn.Parameter(torch.zeros(count))

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

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """The whole, twice."""
        return x, x, self.count - 1

    def rows(self, own: Tensor, before: Tensor) -> Tensor:
        """Each token beside those before it, the nearest first."""
        others = (before[:, k : k + own.shape[1]] for k in range(self.count - 2, -1, -1))
        out = torch.stack([own, *others], dim=-2) * self.shares[:, None]
        return out.to(own.dtype).flatten(-2)

    def extra_repr(self) -> str:
        return f"{self.dim}, count={self.count}"


@register_bound(TokenShift)
def _(module: TokenShift, ask: Ask) -> Bound:
    ask.along(-2)
    if ask.norm == "self":
        # Not 0 with all features shifted: see the class.
        return Bound(1.0, "projection")
    if ask.norm == "token" and 0 < module.shifted < module.dim:
        return Bound(math.sqrt(2.0) * ROUND_UP, "parts of two tokens")
    return Bound(1.0, "partial isometry")


@register_bound(TokenStack)
def _(module: TokenStack, ask: Ask) -> Bound:
    ask.along(-2)
    shares = module.shares.double()
    if ask.norm == "self":
        return Bound(shares[0] * ROUND_UP, "share of the token itself")
    value = shares.amax() if ask.norm == "linf" else torch.linalg.vector_norm(shares)
    return Bound(value * ROUND_UP, "shares of several tokens")


def _step(module: TokenWindow, x: Tensor, cache: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
    return module.step(x, cache, call.key_padding_mask)


def _push(module: TokenWindow, x: Tensor, tangents: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    # Linear: what it makes of a token where no other is seen.
    own, shown, last = module.parts(tangents.flatten(0, 1))
    zeros = shown.new_zeros(len(shown), last + shown.shape[1] - 1, shown.shape[-1])
    pushed = module.rows(own, zeros).unflatten(0, tangents.shape[:2])
    return module(x, call.key_padding_mask), pushed


# For each class: a rule of the base would serve none, as they have methods of their own.
for _class in (TokenShift, TokenStack):
    register_step(_class)(_step)
    register_own_token(_class)(_push)
