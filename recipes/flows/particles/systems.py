"""Energies of two systems of particles, and a Markov chain that draws from them.

Source: Köhler, Klein, Noé 2020. The density of a system is :math:`e^{-u(x)} / Z` in the subspace of
positions (N, d) with mean zero, of (N - 1) d dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor


def double_well(squared: Tensor) -> Tensor:
    r""":math:`0.9 (d - 4)^4 - 4 (d - 4)^2`, of :math:`d^2`."""
    offset = (squared.sqrt() - 4.0).square()
    return 0.9 * offset.square() - 4.0 * offset


def lennard_jones(squared: Tensor) -> Tensor:
    r""":math:`d^{-12} - 2 d^{-6}`, of :math:`d^2`."""
    attraction = squared**-3
    return attraction.square() - 2.0 * attraction


@dataclass(frozen=True)
class System:
    r""":math:`u(x) = \sum_{i<j} v(|x_i - x_j|^2) + \frac{k}{2} \sum_i |x_i - \bar x|^2`.

    Attributes:
        name: of the system.
        particles: N.
        dim: d.
        pair: v.
        trap: k.
        moves: standard deviations of the chain's moves of one particle, in turn.
        entropy: of the density in the mean-free subspace, in nats: no model has a lower negative
            log-likelihood. DW4: importance sampling and the literature; LJ13: thermodynamic
            integration from k alone, 16 soft-core states (README).
    """

    name: str
    particles: int
    dim: int
    pair: Callable[[Tensor], Tensor]
    trap: float
    moves: tuple[float, ...]
    entropy: float

    @property
    def freedom(self) -> int:
        """(N - 1) d, the dimensions of the mean-free subspace."""
        return (self.particles - 1) * self.dim

    def energy(self, x: Tensor) -> Tensor:
        """u of positions (*, N, d), (*)."""
        i, j = torch.triu_indices(self.particles, self.particles, 1)
        pairs = self.pair((x[..., i, :] - x[..., j, :]).square().sum(-1)).sum(-1)
        return pairs + 0.5 * self.trap * mean_free(x).square().sum((-2, -1))


DW4 = System("dw4", 4, 2, double_well, 0.0, (0.5, 2.0, 0.3), 7.11)
LJ13 = System("lj13", 13, 3, lennard_jones, 1.0, (0.3, 1.0, 0.15), 39.7)
SYSTEMS = {system.name: system for system in (DW4, LJ13)}


def mean_free(x: Tensor) -> Tensor:
    """Positions (*, N, d) moved so that their mean is zero."""
    return x - x.mean(-2, keepdim=True)


def moved(x: Tensor, generator: Generator) -> Tensor:
    """Each system (B, N, d) turned or reflected, and its particles in another order, at random."""
    batch, particles, dim = x.shape
    turn, triangle = torch.linalg.qr(torch.randn(batch, dim, dim, generator=generator).to(x))
    # QR with a positive diagonal: uniform over all rotations and reflections.
    turn = turn * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    order = torch.rand(batch, particles, generator=generator).argsort(-1)
    return x.gather(1, order.unsqueeze(-1).expand_as(x)) @ turn


class Drawn(NamedTuple):
    """Draws of a Markov chain and what tells whether it has converged.

    Attributes:
        x: (chains, draws, N, d), mean-free, float64.
        acceptance: of the moves after the burn-in.
        rhat: split R-hat of the energy.
        halves: mean energy of the first and of the second half of the draws.
    """

    x: Tensor
    acceptance: float
    rhat: float
    halves: tuple[float, float]


def split_rhat(values: Tensor) -> float:
    """Split R-hat (Gelman et al. 2013) of a number in each draw of each chain, (chains, draws)."""
    draws = values.shape[1] // 2
    parts = torch.cat([values[:, :draws], values[:, -draws:]])
    within = parts.var(1).mean()
    return math.sqrt((within * (draws - 1) / draws + parts.mean(1).var()) / within)


def markov_chain(system: System, chains: int, draws: int, *, burn: int, thin: int, seed: int) -> Drawn:
    """Metropolis moves of one particle after another, in many chains at once.

    The particles of a draw are in random order: a chain's own order would be that of its start.

    Args:
        system: to draw from.
        chains: that run side by side, each from a start of its own.
        draws: kept of each chain.
        burn: sweeps over all particles before the first draw.
        thin: sweeps for each draw.
        seed: of everything.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):
        return _markov_chain(system, chains, draws, burn, thin, generator)


def _markov_chain(
    system: System, chains: int, draws: int, burn: int, thin: int, generator: Generator
) -> Drawn:
    number, dim, wide = system.particles, system.dim, torch.float64
    x = 2.0 * torch.randn(chains, number, dim, generator=generator, dtype=wide)
    kept, energies, accepted, tried = [], [], 0.0, 0
    others = [torch.tensor([j for j in range(number) if j != i]) for i in range(number)]
    for step in range((burn + draws * thin) * number):
        i = step % number
        size = system.moves[(step // number + step) % len(system.moves)]
        y = x.clone()
        y[:, i] += size * torch.randn(chains, dim, generator=generator, dtype=wide)
        rest = x[:, others[i]]
        change = system.pair((y[:, i, None] - rest).square().sum(-1)).sum(-1)
        change -= system.pair((x[:, i, None] - rest).square().sum(-1)).sum(-1)
        if system.trap:
            change += 0.5 * system.trap * (_spread(y) - _spread(x))
        take = torch.rand(chains, generator=generator, dtype=wide).log() < -change
        x = torch.where(take[:, None, None], y, x)
        sweep, last = divmod(step + 1, number)
        if sweep > burn:
            accepted, tried = accepted + take.double().mean().item(), tried + 1
            if last == 0 and (sweep - burn) % thin == 0:
                x = mean_free(x)
                order = torch.rand(chains, number, generator=generator).argsort(-1)
                kept.append(x.gather(1, order.unsqueeze(-1).expand_as(x)))
                energies.append(system.energy(x))
    energy = torch.stack(energies, 1)
    half = draws // 2
    halves = (energy[:, :half].mean().item(), energy[:, -half:].mean().item())
    return Drawn(torch.stack(kept, 1), accepted / tried, split_rhat(energy), halves)


def _spread(x: Tensor) -> Tensor:
    """Sum of squared distances from the mean, (B,)."""
    return x.square().sum((1, 2)) - x.sum(1).square().sum(1) / x.shape[1]
