"""A classifier of the points of a set, of certified constant 1 up to its head, in three arms."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.layers import (
    Contractive,
    ConvexResidual,
    FeedForward,
    L2MultiheadAttention,
    SpectralLinear,
)
from recipes.margin import MarginModule
from recipes.pgd import logit_margin
from recipes.sets.data import FEATURES
from training.errors import BadInput

Arm = Literal["none", "global", "ball"]


def mixing(
    arm: Arm, dim: int, heads: int, points: int, temperature: float, key_radius: float
) -> nn.Module:
    """The branch of constant 1 in which arms differ: (B, N, D) -> (B, N, D).

    L2 attention without a mask, divided by its gain: for any keys ("global", Theorem G) or for keys in a
    ball ("ball", Theorem F). For "none" a feed-forward part with as many weights, which mixes nothing.
    """
    if arm == "none":
        return FeedForward(dim, dim)
    attention = L2MultiheadAttention(
        dim,
        heads,
        batch_first=True,
        causal=False,
        max_len=points,
        key_radius=key_radius if arm == "ball" else None,
    )
    # A random matrix divided by its norm has a typical gain of 1/2, an orthogonal one of 1.
    nn.init.orthogonal_(attention.q_proj.weight)
    nn.init.orthogonal_(attention.out_proj.weight)
    assert attention.log_temperature is not None
    nn.init.constant_(attention.log_temperature, math.log(temperature))
    return Contractive(attention, 1.0, norm="l2")


class SetModule(MarginModule):
    r"""Points with noisy labels to the logits of their true ones, trained with a margin.

    An embedding of norm 1, two convex residuals, one around the branch of the arm (:func:`mixing`) and
    one around a feed-forward part of constant 1, and a linear head.

    Args:
        attention: the arm.
        points: of a set; is data.points.
        dim: width of a point's features.
        num_heads: of the attention.
        attention_weight: a in (1 - a) x + a f(x) around the arm's branch.
        feed_forward_weight: the same around the feed-forward part.
        temperature: t of the attention at the start.
        key_radius: R of the arm "ball" at the start, of a head with :math:`r = \sqrt t R`.
        eps: the radius that is trained for, in the l2 norm of a whole set.
        logit_scale: what logits are multiplied by in the loss.
        lr: largest learning rate of one cycle.
    """

    model: nn.Sequential

    def __init__(
        self,
        attention: Arm = "ball",
        points: int = 256,
        dim: int = 16,
        num_heads: int = 1,
        attention_weight: float = 0.9,
        feed_forward_weight: float = 0.5,
        temperature: float = 0.36,
        key_radius: float = 1.0,
        eps: float = 0.02,
        logit_scale: float = 50.0,
        lr: float = 1e-2,
    ) -> None:
        if not temperature > 0.0:
            raise BadInput(f"--model.temperature must be positive, got {temperature}")
        model = nn.Sequential(
            SpectralLinear(FEATURES, dim, mode="normalize"),
            ConvexResidual(
                mixing(attention, dim, num_heads, points, temperature, key_radius), attention_weight
            ),
            ConvexResidual(FeedForward(dim, 2 * dim), feed_forward_weight),
            nn.Linear(dim, 2),
        )
        super().__init__(model, eps, logit_scale, lr)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        self.save_hyperparameters()

    @property
    def head(self) -> nn.Linear:
        """The last linear map, features to logits."""
        return self.model[-1]  # type: ignore[return-value]

    def measured_gain(self) -> float:
        """The certified constant from a set to the head's input, in the l2 norm."""
        return lf.certify(self.model[:-1]).bound

    @torch.no_grad()
    def radii(self, x: Tensor, labels: Tensor) -> Tensor:
        r"""How far a set may be changed, in the l2 norm of all its points, with a point's label kept.

        The features of a point move by at most :math:`L \|E\|_F` when the set moves by E, so that the
        label y stands against j within :math:`(f_y - f_j) / (\|w_y - w_j\| L)`. Margins must exceed that
        by 1e-5 of the largest logit, for the rounding of a forward pass in float32.

        Args:
            x: (B, N, 4).
            labels: the true ones, (B, N).

        Returns:
            (B, N) in float64, 0 where the answer is wrong.
        """
        logits = self.model(x).double().flatten(0, 1)
        margin = logit_margin(logits, labels.flatten()) - 1e-5 * logits.abs().amax(1)
        apart = torch.linalg.vector_norm(self.head.weight[0].double() - self.head.weight[1].double())
        radius = margin / (apart * self.measured_gain() * (1.0 + 1e-12))
        return radius.clamp_min(0.0).view(labels.shape)
