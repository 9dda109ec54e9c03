"""Densities of sets up to translation: in the subspace of tokens (T, D) whose mean is zero.

A block that keeps the mean of the tokens and moves with it has the same log-determinant on all tokens
(T, D) as on the subspace: there is nothing to correct but the noise, which has (T - 1) D dimensions, and
scales, which act about the mean (docs/theory, section 6).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.flows.act_norm import FirstBatch
from lipformer.flows.linear import WithLogDet
from lipformer.functional.rounding import ROUND_UP
from lipformer.layers import layout
from lipformer.layers.token_mean import mean_free


class MeanFreeNormal:
    r"""The standard normal of tokens (T, D) with mean zero, of (T - 1) D dimensions; a base of flows.

    .. math:: \log p(z) = -\tfrac12 \sum_i |z_i - \bar z|^2 - \tfrac12 (T - 1) D \log 2\pi

    Args:
        seq_len: T.
        dim: D.
    """

    def __init__(self, seq_len: int, dim: int) -> None:
        self.batch_shape = torch.Size()
        self.event_shape = torch.Size((seq_len, dim))

    def log_prob(self, z: Tensor) -> Tensor:
        """Of (B, T, D), whose mean does not count, (B,)."""
        freedom = (z.shape[1] - 1) * z.shape[2]
        squares = mean_free(z).square().sum((1, 2))
        return -0.5 * (squares + freedom * math.log(2.0 * math.pi))

    def sample(self, sample_shape: torch.Size) -> Tensor:
        """Draws of mean zero, (n, T, D)."""
        return mean_free(torch.randn(*sample_shape, *self.event_shape))

    def __repr__(self) -> str:
        return f"MeanFreeNormal{tuple(self.event_shape)}"


class MeanFreeScale(FirstBatch, WithLogDet):
    r""":math:`y_i = \bar x + e^s (x_i - \bar x)`: one scale about the mean of n tokens, which stays.

    :math:`\log|\det J| = (n - 1) D s`. The first training batch gets deviation 1. It turns, reflects,
    permutes and moves with its input, as ActNorm, which has a scale and a shift for each feature, does
    not.

    Example:
        >>> block = MeanFreeScale()
        >>> y, log_det = block.forward_and_log_det(5.0 + 2.0 * torch.randn(8, 10, 3))
        >>> log_det.shape, bool((block.inverse(y).mean() - y.mean()).abs() < 1e-4)
        (torch.Size([8]), True)
    """

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    @torch.no_grad()
    def initialize(self, x: Tensor, padded: Tensor | None = None) -> None:
        """Sets the scale so that this batch gets deviation 1 about each sample's mean."""
        if not bool(torch.isfinite(layout.without_padding(x, padded)).all()):
            raise ValueError("MeanFreeScale's first batch has entries that are NaN or infinite")
        freedom = (_count(x, padded) - 1).clamp_min(0).sum() * x.shape[-1]
        squares = mean_free(x.double(), padded).square().sum()
        if freedom > 0 and squares > 0:
            self.log_scale.copy_(-0.5 * (squares / freedom).log())
            self.note()

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        padded = layout.padding(key_padding_mask, x)
        self.prepare(x, padded)
        return (x + self.log_scale.expm1() * mean_free(x, padded)).to(x.dtype)

    def inverse(self, y: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """The inverse, exact up to rounding: (B, T, D) -> (B, T, D)."""
        padded = layout.padding(key_padding_mask, y)
        return (y + (-self.log_scale).expm1() * mean_free(y, padded)).to(y.dtype)

    def _log_det(self, x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        scale = self.log_scale.to(torch.promote_types(x.dtype, torch.float32))
        freedom = (_count(x, layout.padding(key_padding_mask, x)) - 1).clamp_min(0) * x.shape[-1]
        return scale * freedom.to(scale.dtype)


def _count(x: Tensor, padded: Tensor | None) -> Tensor:
    """Unpadded tokens of each sample (B,)."""
    if padded is None:
        return torch.full((x.shape[0],), x.shape[1], device=x.device)
    return (~padded).sum(-1)


@register_bound(MeanFreeScale)
def _(module: MeanFreeScale, ask: Ask) -> Bound:
    ask.only("l2")
    module.check_set(ask)
    return Bound((module.log_scale.double().exp() * ROUND_UP**2).clamp_min(1.0), "max(1, exp(s))")
