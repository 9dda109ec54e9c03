"""Densities of mean-free positions: the equivariant flow, and what it is measured against.

RealNVP and the neural spline flow know nothing of the symmetries of a system: they learn from turned,
reflected and reordered samples, on the (N - 1) d coordinates of an orthonormal basis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lipformer.flows import AttentionFlow, Flow, InvertibleResidual, MeanFreeNormal, MeanFreeScale
from lipformer.flows.attention_flow import attention_branch, feed_forward_branch
from lipformer.layers import PairRadial, SubtractMean
from recipes.flows.baselines import real_nvp, real_nvp_parameters
from recipes.flows.particles.systems import System

# Blocks of the flows by system: scales, and pair maps (or feed-forward networks) after each.
DEPTH = {"dw4": (4, 4), "lj13": (4, 4)}
COEFF = 0.97


def pair_flow(system: System) -> Flow:
    """A flow of pair maps alone."""
    depth, pairs = DEPTH[system.name]
    blocks: list[nn.Module] = []
    for _ in range(depth):
        maps = (InvertibleResidual(PairRadial(), COEFF, log_det="exact") for _ in range(pairs))
        blocks += [MeanFreeScale(), *maps]
    return Flow([*blocks, MeanFreeScale()], MeanFreeNormal(system.particles, system.dim))


def attention_flow(system: System) -> Flow:
    """The equivariant AttentionFlow: attention with scalar weights before the pair maps."""
    depth, pairs = DEPTH[system.name]
    options: dict[str, Any] = {"seq_len": system.particles, "log_det": "exact", "equivariant": True}
    return AttentionFlow(
        system.dim, depth=depth, num_heads=4, hidden=24, feed_forwards=pairs, coeff=COEFF, **options
    )


def free_flow(system: System) -> Flow:
    """Attention and feed-forward networks with free weights, which learn to turn from turned samples."""
    depth, _ = DEPTH[system.name]
    blocks: list[nn.Module] = []
    for _ in range(depth):
        attention = attention_branch(
            system.dim, 4, width=32, causal=False, positions=None, key_radius=0.7, context_dim=None
        )
        blocks.append(MeanFreeScale())
        for branch in (attention, feed_forward_branch(system.dim, (32, 32), None)):
            centred = nn.Sequential(SubtractMean(), branch, SubtractMean())
            options: dict[str, Any] = {"log_det": "exact", "seq_len": system.particles}
            blocks.append(InvertibleResidual(centred, COEFF, **options))
    return Flow([*blocks, MeanFreeScale()], MeanFreeNormal(system.particles, system.dim))


def basis(particles: int) -> Tensor:
    """An orthonormal basis (N, N - 1) of the vectors of sum zero, so that densities are kept."""
    rows = torch.cat([torch.ones(particles, 1), torch.eye(particles)[:, 1:]], 1)
    return torch.linalg.qr(rows).Q[:, 1:]


class Coordinates(nn.Module):
    """A density of (N - 1) d free coordinates as one of mean-free positions (B, N, d).

    Args:
        system: of the particles.
        scale: standard deviation of the coordinates, by which they are divided.
        model: whose parameters are trained.
        density: log p of (B, (N - 1) d), (B,).
        draw: n -> samples of it, (n, (N - 1) d).
    """

    basis: Tensor

    def __init__(
        self,
        system: System,
        scale: float,
        model: nn.Module,
        density: Callable[[Tensor], Tensor],
        draw: Callable[[int], Tensor],
    ) -> None:
        super().__init__()
        self.system, self.scale, self.model = system, scale, model
        self.density, self.draw = density, draw
        self.register_buffer("basis", basis(system.particles))

    def log_prob(self, x: Tensor) -> Tensor:
        """log p of positions (B, N, d) in the mean-free subspace, (B,)."""
        free = torch.einsum("bnd,nk->bkd", x, self.basis).flatten(1) / self.scale
        return self.density(free) - self.system.freedom * math.log(self.scale)

    def sample(self, n: int) -> Tensor:
        """Mean-free positions (n, N, d)."""
        free = self.draw(n).unflatten(1, (self.system.particles - 1, self.system.dim)) * self.scale
        return torch.einsum("bkd,nk->bnd", free, self.basis)


def real_nvp_coordinates(system: System, scale: float) -> Coordinates:
    """Eight affine couplings of normflows, log-scales in (-2, 2), networks of two hidden layers."""
    parameters = real_nvp_parameters(system.freedom, 64 if system.freedom < 10 else 128)
    model: Any = real_nvp(system.particles - 1, system.dim, parameters, log_scale=2.0)
    return Coordinates(system, scale, model, model.log_prob, lambda n: model.sample(n)[0])


def spline_coordinates(system: System, scale: float) -> Coordinates:
    """Five autoregressive spline transforms of zuko, networks of two hidden layers."""
    import zuko

    hidden = 64 if system.freedom < 10 else 128
    flow = zuko.flows.NSF(system.freedom, transforms=5, hidden_features=(hidden, hidden))
    return Coordinates(
        system, scale, flow, lambda z: flow().log_prob(z), lambda n: flow().sample(torch.Size((n,)))
    )


FLOWS = {"pairs": pair_flow, "attention": attention_flow, "free": free_flow}
BASELINES = {"realnvp": real_nvp_coordinates, "nsf": spline_coordinates}


def build(name: str, system: System, x: Tensor) -> Any:
    """A model by name, its scales set by some samples (B, N, d)."""
    if name in FLOWS:
        flow = FLOWS[name](system)
        flow.initialize(x)
        return flow
    scale = math.sqrt(x.square().sum((1, 2)).mean().item() / system.freedom)
    model = BASELINES[name](system, scale)
    model.log_prob(x)  # sets its ActNorms
    return model
