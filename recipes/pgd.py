"""Projected gradient ascent in the l2 norm: how much of a model's accuracy an attack takes away.

Source: Madry et al. 2018. What it finds is an upper bound on the robust accuracy; a certificate is a
lower bound, so that PGD accuracy is never below certified accuracy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import lipformer as lf


def logit_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """The label's logit less the largest other one, (B, K), (B,) -> (B,): negative if misclassified."""
    own = logits.gather(1, labels[:, None])
    rest = logits.scatter(1, labels[:, None], -torch.inf)
    return (own - rest.amax(1, keepdim=True)).squeeze(1)


Box = tuple[float, float] | None
"""Where inputs lie, in each coordinate; None for anywhere."""


def lengths(x: Tensor) -> Tensor:
    """The l2 norm of each sample, in float64 and not zero: (B, *) -> (B, 1, ..., 1)."""
    norm = x.flatten(1).double().norm(dim=1).clamp_min(1e-30)
    return norm.view(-1, *[1] * (x.ndim - 1))


def project_to_ball(x: Tensor, centre: Tensor, eps: float, box: Box = (0.0, 1.0)) -> Tensor:
    """x (B, *) moved into the ball of radius eps around the centre, and into the box.

    Clipping does not leave the ball: the centre lies in the box, a convex set.
    """
    way = x - centre
    # A little less than eps, so that rounding does not lead out of the ball.
    factor = (eps * (1.0 - 1e-6) / lengths(way)).clamp_max(1.0).to(x.dtype)
    moved = centre + factor * way
    return moved if box is None else moved.clamp(*box)


def pgd(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    eps: float,
    *,
    steps: int = 20,
    restarts: int = 2,
    box: Box = (0.0, 1.0),
    generator: torch.Generator | None = None,
) -> Tensor:
    """The worst inputs found within eps, (B, *) as the images.

    The first start is the image, the others are random points of the ball's surface. Each step goes
    2.5 eps / steps down the gradient of the margin; the worst point on the way is kept.

    Args:
        model: images to logits, in eval mode.
        images: or other inputs, (B, *).
        labels: (B,).
        eps: radius in the l2 norm.
        steps: of each start.
        restarts: number of starts.
        box: where inputs lie: pixels in [0, 1], by default.
        generator: of the random starts, on the CPU.
    """
    worst, best = images, torch.full((len(images),), torch.inf, device=images.device)
    with torch.enable_grad(), lf.frozen(model):
        for start in range(restarts):
            x = images
            if start:
                noise = torch.randn(images.shape, generator=generator).to(images)
                way = eps * noise / lengths(noise).to(noise.dtype)
                x = project_to_ball(images + way, images, eps, box)
            for step in range(steps + 1):
                x = x.detach().requires_grad_()
                margins = logit_margin(model(x), labels)
                worse = margins.detach() < best
                best = torch.where(worse, margins.detach(), best)
                worst = torch.where(worse.view(-1, *[1] * (x.ndim - 1)), x.detach(), worst)
                if step < steps:
                    (slope,) = torch.autograd.grad(margins.sum(), x)
                    way = 2.5 * eps / steps * slope / lengths(slope).to(slope.dtype)
                    x = project_to_ball(x.detach() - way, images, eps, box)
    return worst


def pgd_accuracy(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    eps: float,
    batch_size: int = 500,
    **options: Any,
) -> float:
    """The part of the images that the model gets right at the worst points found by :func:`pgd`."""
    generator = torch.Generator().manual_seed(0)
    right = 0
    for x, y in zip(images.split(batch_size), labels.split(batch_size), strict=True):
        found = pgd(model, x, y, eps, generator=generator, **options)
        with torch.no_grad():
            right += int((logit_margin(model(found), y) > 0).sum())
    return right / len(images)
