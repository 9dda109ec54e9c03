"""The parts of a Vision Transformer from pixels to tokens, and from tokens to features."""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound


class PixelNorm(nn.Module):
    r"""(x - mean) / std of each channel, of constant :math:`1 / \min \mathrm{std}`.

    Inside the model, so that its certificate counts in pixels of [0, 1].

    Args:
        mean: one number for each channel.
        std: one positive number for each channel.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("std", torch.tensor(std)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        return (x - self.mean) / self.std


@register_bound(PixelNorm)
def _(module: PixelNorm, ask: Ask) -> Bound:
    ask.only("l2", "linf")
    return Bound((1.0 + 2.0**-50) / module.std.double().min(), "1 / smallest std")


class Patches(nn.Module):
    """Cuts images into patches that do not overlap: one token of C p p pixels for each.

    Args:
        channels: C.
        image_size: pixels in each direction.
        patch: p.
    """

    def __init__(self, channels: int, image_size: int, patch: int) -> None:
        super().__init__()
        self.shape = (channels, image_size, image_size)
        self.patch = patch

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, C p p), row by row."""
        if x.ndim != 4 or x.shape[1:] != self.shape:
            allowed = ", ".join(str(size) for size in self.shape)
            raise ValueError(f"images must be (B, {allowed}), got {tuple(x.shape)}")
        return rearrange(x, "b c (h p) (w q) -> b (h w) (c p q)", p=self.patch, q=self.patch)

    def extra_repr(self) -> str:
        return f"{self.shape}, patch={self.patch}"


@register_bound(Patches)
def _(module: Patches, ask: Ask) -> Bound:
    ask.only("l2", "linf")
    return Bound(1.0, "rearrangement of pixels", keeps_tokens=False)


class Positions(nn.Module):
    """Adds a learned vector to each token: a constant shift, of constant 1.

    Args:
        tokens: N.
        dim: D.
        std: of the initial vectors.
    """

    def __init__(self, tokens: int, dim: int, std: float) -> None:
        super().__init__()
        self.vectors = nn.Parameter(std * torch.randn(tokens, dim))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        return x + self.vectors

    def extra_repr(self) -> str:
        return f"{self.vectors.shape[0]} tokens"


@register_bound(Positions)
def _(module: Positions, ask: Ask) -> Bound:
    return Bound(1.0, "constant shift")


class TokenMean(nn.Module):
    r"""The mean of N tokens, of constant :math:`1/\sqrt N` in the l2 norm, 1 in the others.

    :math:`\|\frac1N \sum_i e_i\| \le \frac1N \sum_i \|e_i\| \le \frac{1}{\sqrt N} \|E\|_F`, with
    equality where all :math:`e_i` are equal.

    Args:
        tokens: N; other numbers of tokens are refused, as they have another constant.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, D)."""
        if x.ndim != 3 or x.shape[1] != self.tokens:
            raise ValueError(f"expected (B, {self.tokens}, D), got {tuple(x.shape)}")
        return x.mean(1)

    def extra_repr(self) -> str:
        return f"{self.tokens} tokens"


@register_bound(TokenMean)
def _(module: TokenMean, ask: Ask) -> Bound:
    ask.only("l2", "token", "linf")
    if ask.norm != "l2":
        return Bound(1.0, "mean of tokens", keeps_tokens=False)
    value = (1.0 + 2.0**-50) / math.sqrt(module.tokens)
    return Bound(value, "mean of tokens, 1 / sqrt(N)", keeps_tokens=False)
