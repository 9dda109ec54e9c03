"""Token-wise layers that keep activations in place at a known constant."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.functional.rounding import ROUND_UP
from lipformer.layers.token_wise import register_token_wise


class CenterNorm(nn.Module):
    r"""Centres each token, :math:`\frac{d}{d-1}\,(x - \bar x)`, with an optional learned affine map.

    Source: LipsFormer. Constant d/(d-1) in the l2 and token norms (2 in linf), times max|gamma|.

    Args:
        dim: :math:`d \ge 2`.
        elementwise_affine: learn a scale and a shift per feature.
    """

    def __init__(self, dim: int, elementwise_affine: bool = False) -> None:
        super().__init__()
        if dim < 2:
            raise ValueError(f"dim must be at least 2, got {dim}")
        self.dim = dim
        self.weight = nn.Parameter(torch.ones(dim)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros(dim)) if elementwise_affine else None

    def forward(self, x: Tensor) -> Tensor:
        """(*, d) -> (*, d)."""
        if x.shape[-1] != self.dim:
            raise ValueError(f"the last dimension must be {self.dim}, got shape {tuple(x.shape)}")
        centred = (x - x.mean(-1, keepdim=True)) * (self.dim / (self.dim - 1))
        scaled = centred if self.weight is None else centred * self.weight
        return scaled if self.bias is None else scaled + self.bias

    def extra_repr(self) -> str:
        return f"{self.dim}, elementwise_affine={self.weight is not None}"


@register_bound(CenterNorm)
def _(module: CenterNorm, ask: Ask) -> Bound:
    constant = 2.0 if ask.norm == "linf" else module.dim / (module.dim - 1) * ROUND_UP**2
    if module.weight is None:
        return Bound(constant, "centring")
    return Bound(constant * module.weight.double().abs().max() * ROUND_UP**2, "centring, max|gamma|")


class BallProjection(nn.Module):
    r"""Projects each token on the ball of radius R: :math:`x \min(1, R/\|x\|)`.

    Constant 1 in the l2 and token norms.

    Args:
        radius: :math:`R > 0`.
    """

    def __init__(self, radius: float) -> None:
        super().__init__()
        if not 0.0 < radius < math.inf:
            raise ValueError(f"radius must be positive and finite, got {radius!r}")
        self.radius = float(radius)

    def forward(self, x: Tensor) -> Tensor:
        """(*, d) -> (*, d)."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # In units of the radius, and of the largest entry, so that no square overflows; the root is
        # taken of a number >= 1 only, so that derivatives of all orders exist inside the ball.
        wide = wide / self.radius
        top = wide.detach().abs().amax(-1, keepdim=True).clamp_min(1.0)
        square = (wide / top).square().sum(-1, keepdim=True)
        scale = torch.maximum(square, top**-2).rsqrt() / top
        return (x * scale).to(x.dtype)

    def extra_repr(self) -> str:
        return f"radius={self.radius}"


@register_bound(BallProjection)
def _(module: BallProjection, ask: Ask) -> Bound:
    ask.only("l2", "token", "self")
    return Bound(1.0, "projection on a convex set")


for _class in (CenterNorm, BallProjection):
    register_token_wise(_class)
