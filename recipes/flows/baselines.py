"""What the flow is measured against: a Gaussian and a RealNVP, both of the whole set at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class SetGaussian:
    """The Gaussian with full covariance over all coordinates of a set, by maximum likelihood.

    It is the strongest Gaussian there is: it knows how the points of a set depend on one another,
    which a Gaussian of single points does not. The points of a set come in no order, so mean and
    covariance are averaged over all orders, which only helps it on held-out sets.

    Args:
        x: training sets (B, T, D).
    """

    def __init__(self, x: Tensor) -> None:
        _, points, dim = x.shape
        x = x.double()
        centred = x - x.mean((0, 1))
        own = torch.einsum("btd,bte->de", centred, centred) / (len(x) * points)
        total = centred.sum(1)
        pairs = torch.einsum("bd,be->de", total, total) / len(x) - points * own
        other = pairs / (points * (points - 1)) if points > 1 else torch.zeros_like(own)
        covariance = torch.kron(torch.eye(points, dtype=x.dtype), own - other)
        covariance += torch.kron(torch.ones(points, points, dtype=x.dtype), other)
        mean = x.mean((0, 1)).repeat(points)
        self.distribution = torch.distributions.MultivariateNormal(mean, covariance)
        self.parameters = dim + 2 * dim * dim

    def log_prob(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B,)."""
        return self.distribution.log_prob(x.flatten(1).double())


def real_nvp(
    points: int, dim: int, parameters: int, layers: int = 8, log_scale: float | None = None
) -> nn.Module:
    """A RealNVP of normflows on the flattened set, of about this many parameters.

    Couplings of affine maps with one half of the coordinates each, ActNorm between them, and the
    halves alternate between the first and the second coordinates of all points and halves of the
    points, so that both kinds of dependence are seen.

    Args:
        points: T.
        dim: D.
        parameters: to reach or stay just below, by the width of the networks.
        layers: number of couplings.
        log_scale: bound c of the couplings' log-scales, as c tanh; None for none.
    """
    import normflows as nf

    size = points * dim
    column = torch.arange(size)
    masks = [(column % dim) % 2 == 0, column < size // 2]

    fitting = (h for h in range(1, 513) if real_nvp_parameters(size, h, layers) <= parameters)
    hidden = max(fitting, default=1)
    bounded = {} if log_scale is None else {"output_fn": "tanh", "output_scale": log_scale}
    flows: list[nn.Module] = []
    for index in range(layers):
        mask = masks[(index // 2) % 2].float()
        shift, scale = (
            nf.nets.MLP([size, hidden, hidden, size], init_zeros=True, **options)
            for options in ({}, bounded)
        )
        flows.append(nf.flows.MaskedAffineFlow(mask if index % 2 == 0 else 1.0 - mask, shift, scale))
        flows.append(nf.flows.ActNorm(size))
    return nf.NormalizingFlow(nf.distributions.DiagGaussian(size, trainable=False), flows)


def real_nvp_parameters(size: int, hidden: int, layers: int = 8) -> int:
    """Of two networks size -> hidden -> hidden -> size with biases and one ActNorm for each coupling."""
    network = 2 * size * hidden + hidden * hidden + 2 * hidden + size
    return layers * 2 * (network + size)


def train_real_nvp(model: nn.Module, batches: Iterable[Tensor], steps: int, lr: float) -> list[float]:
    """Maximum likelihood with the flow's own optimiser and schedule; returns the losses in nats.

    Args:
        model: of :func:`real_nvp`.
        batches: training sets (B, T, D), at least ``steps`` of them.
        steps: number of updates.
        lr: the largest of the schedule.
    """
    from recipes.flows.module import optimiser

    settings = optimiser(model, lr, steps)
    losses = []
    for _, x in zip(range(steps), batches, strict=False):
        loss = model.forward_kld(x.flatten(1))  # type: ignore[operator]
        settings["optimizer"].zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        settings["optimizer"].step()
        settings["lr_scheduler"]["scheduler"].step()
        losses.append(loss.item())
    return losses
