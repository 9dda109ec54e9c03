"""The mean of a sample's tokens, and the tokens without it."""

from __future__ import annotations

import math

from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.functional.rounding import ROUND_UP
from lipformer.layers.layout import padding, without_padding


def token_mean(x: Tensor, key_padding_mask: Tensor | None = None, least: int = 1) -> Tensor:
    """The sum of the tokens (B, N, D) that are no padding over max(their number, least), (B, D)."""
    if x.ndim != 3:
        raise ValueError(f"x must have shape (B, N, D), got {tuple(x.shape)}")
    hidden = padding(key_padding_mask, x)
    if hidden is None:
        return x.mean(1) if x.shape[1] >= least else x.sum(1) / least
    # In float32 a number of tokens is exact, in bfloat16 none above 256 need be.
    count = (~hidden).sum(1, keepdim=True).clamp_min(least).float()
    return (without_padding(x, hidden).sum(1) / count).to(x.dtype)


def mean_free(x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """Tokens (B, N, D) minus the mean of those that are no padding, zero at padded ones."""
    mean = token_mean(x, key_padding_mask)
    return without_padding(x - mean.unsqueeze(1), padding(key_padding_mask, x))


class TokenMean(nn.Module):
    r"""Averages the tokens without padding, with constant :math:`1/\sqrt{n_0}` in the l2 norm.

    For n tokens it is :math:`\frac{1}{\max(n, n_0)} \sum_i e_i`: if there are fewer than
    :math:`n_0`, the missing ones count as zeros, so that

    .. math:: \Big\|\frac{1}{\max(n, n_0)} \sum_{i=1}^n e_i\Big\|
        \le \frac{\sqrt n}{\max(n, n_0)} \|E\|_F \le \frac{1}{\sqrt{n_0}} \|E\|_F,

    with equality for :math:`n_0` equal tokens. In the token and linf norms the constant is 1.

    Args:
        least: :math:`n_0 \ge 1`; 1 is the plain mean, of constant 1.

    Example:
        >>> import torch, lipformer as lf
        >>> x = torch.tensor([[[2.0, 4.0], [4.0, 6.0], [9.0, 9.0]]])
        >>> TokenMean()(x, key_padding_mask=torch.tensor([[False, False, True]]))
        tensor([[3., 5.]])
        >>> round(lf.certify(TokenMean(least=16)).bound, 6)
        0.25
    """

    batch_first = True

    def __init__(self, least: int = 1) -> None:
        super().__init__()
        if isinstance(least, bool) or not isinstance(least, int) or least < 1:
            raise ValueError(f"least must be an integer >= 1, got {least!r}")
        self.least = least

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """(B, N, D), and (B, N), True at padded tokens -> (B, D)."""
        return token_mean(x, key_padding_mask, self.least)

    def extra_repr(self) -> str:
        return f"least={self.least}"


class SubtractMean(nn.Module):
    r""":math:`x_i - \frac1n \sum_j x_j` over the n tokens that are no padding: an orthogonal projection.

    Example:
        >>> import torch
        >>> SubtractMean()(torch.tensor([[[1.0], [3.0]]])).flatten()
        tensor([-1.,  1.])
    """

    batch_first = True

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """(B, N, D), and (B, N), True at padded tokens -> (B, N, D), zero at padded tokens."""
        return mean_free(x, key_padding_mask)


@register_bound(SubtractMean)
def _(module: SubtractMean, ask: Ask) -> Bound:
    ask.only("l2")
    return Bound(1.0, "projection")


@register_bound(TokenMean)
def _(module: TokenMean, ask: Ask) -> Bound:
    ask.only("l2", "token", "linf")
    if ask.norm != "l2" or module.least <= 1:
        return Bound(1.0, "mean of tokens", tokens=None, dims=2)
    value = ROUND_UP / math.sqrt(module.least)
    return Bound(value, "mean of tokens, 1 / sqrt(least)", tokens=None, dims=2)
