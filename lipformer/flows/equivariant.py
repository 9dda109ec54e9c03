"""Blocks of flows of particles: they turn, reflect, permute and move with their input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn

from lipformer.flows.invertible_residual import InvertibleResidual
from lipformer.flows.mean_free import MeanFreeScale
from lipformer.layers import L2MultiheadAttention, PairRadial, SubtractMean


class TimesIdentity(nn.Module):
    r"""A parametrization: a weight :math:`A \otimes I_d`, which commutes with turning (*, d) tokens.

    Args:
        dim: d.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, raw: Tensor) -> Tensor:
        """(m, n) -> (m d, n d)."""
        return torch.kron(raw, torch.eye(self.dim, dtype=raw.dtype, device=raw.device))

    def right_inverse(self, weight: Tensor) -> Tensor:
        """(m d, n d) -> (m, n), the mean of each block's diagonal."""
        blocks = weight.unflatten(1, (-1, self.dim)).unflatten(0, (-1, self.dim))
        return torch.diagonal(blocks, dim1=1, dim2=3).mean(-1)


def equivariant_attention(dim: int, num_heads: int, key_radius: float | None) -> nn.Sequential:
    r"""Attention of tokens (B, T, d) without their mean, which turns with them.

    Each head reads all of a token, :math:`W_h = w_h I`, and writes :math:`M_h = m_h I`; the layer has
    width H d, for tokens side by side. The gain is that of any weights (docs/theory, section 4).
    """

    def scalar(linear: nn.Linear, start: Tensor) -> nn.Linear:
        parametrize.register_parametrization(linear, "weight", TimesIdentity(dim))
        with torch.no_grad():
            linear.get_parameter("parametrizations.weight.original").copy_(start)
        return linear

    width = num_heads * dim
    attention = L2MultiheadAttention(
        width,
        num_heads,
        bias=False,
        batch_first=True,
        causal=False,
        key_radius=key_radius,
        smooth_radius=key_radius is not None,
    )
    # At first each head reads the tokens as they are, at its own temperature.
    for linear in (attention.q_proj, attention.out_proj):
        scalar(linear, torch.eye(num_heads))
    spread = scalar(nn.Linear(dim, width, bias=False), torch.ones(num_heads, 1))
    gather = scalar(nn.Linear(width, dim, bias=False), torch.randn(1, num_heads))
    return nn.Sequential(SubtractMean(), spread, attention, gather, SubtractMean())


def equivariant_blocks(
    dim: int,
    *,
    depth: int,
    num_heads: int,
    knots: int,
    pairs: int,
    coeff: float,
    key_radius: float | None,
    options: dict[str, Any],
) -> list[nn.Module]:
    """``depth`` times a scale, attention and some pair maps, and a last scale.

    Args:
        dim: D.
        depth: number of attentions.
        num_heads: of each.
        knots: of each :class:`PairRadial`.
        pairs: PairRadial maps after each attention; their log-determinants are exact.
        coeff: contraction of every branch.
        key_radius: of the attention, or None.
        options: further ones of the attention's InvertibleResidual, its ``seq_len`` among them.
    """
    blocks: list[nn.Module] = []
    for _ in range(depth):
        attention = equivariant_attention(dim, num_heads, key_radius)
        blocks += [MeanFreeScale(), InvertibleResidual(attention, coeff, **options)]
        blocks += [InvertibleResidual(PairRadial(knots), coeff, log_det="exact") for _ in range(pairs)]
    return [*blocks, MeanFreeScale()]
