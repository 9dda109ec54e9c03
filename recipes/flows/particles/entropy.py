"""The entropy of a system of particles, by thermodynamic integration: no density has fewer nats.

    python -m recipes.flows.particles.entropy --system lj13
    python -m recipes.flows.particles.entropy --system lj13 --pairs 2

Prints log Z, the mean energy and the entropy with standard errors, after a few minutes of one core.
--pairs and --trap change the energy: other conventions of the sum over pairs and of the trap are in use.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from recipes.cli import run_recipe
from recipes.flows.particles.systems import SYSTEMS, System, markov_chain, mean_free
from recipes.output import parser, show

# Trap of the harmonic well that the way starts from, for a system that has none of its own.
TRAP = 0.2


def gauss_legendre(points: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the quadrature on [0, 1] (Golub, Welsch 1969), (points,) each."""
    k = torch.arange(1, points, dtype=torch.float64)
    side = k / (4.0 * k.square() - 1.0).sqrt()
    values, vectors = torch.linalg.eigh(side.diag(1) + side.diag(-1))
    return (values + 1.0) / 2.0, vectors[0].square()


def harmonic_log_z(freedom: int, trap: float) -> float:
    r""":math:`\log Z = \tfrac n2 \log \frac{2 \pi}{k}`, of :math:`e^{-k |x|^2 / 2}` in n dimensions."""
    return 0.5 * freedom * math.log(2.0 * math.pi / trap)


def soft_core(pair: Callable[[Tensor], Tensor], along: Tensor | float) -> Callable[[Tensor], Tensor]:
    r""":math:`l \, v((d^6 + (1 - l) / 2)^{1/3})`, of :math:`d^2`: finite where particles meet, l < 1.

    Source: Beutler et al. 1994.
    """
    return lambda squared: along * pair((squared**3 + (1.0 - along) / 2.0) ** (1.0 / 3.0))


def between(system: System, along: float) -> System:
    """A system on the way from a harmonic well, l = 0, to the system itself, l = 1."""
    trap = along * system.trap + (1.0 - along) * (system.trap or TRAP)
    return replace(system, pair=soft_core(system.pair, along), trap=trap)


def slope(system: System, along: float, x: Tensor) -> Tensor:
    """The derivative by l of the energy of positions (*, N, d) on the way, (*)."""
    way = torch.full((*x.shape[:-2], 1), along, dtype=x.dtype, requires_grad=True)
    pairs = replace(system, pair=soft_core(system.pair, way), trap=0.0)
    (by_pairs,) = torch.autograd.grad(pairs.energy(x).sum(), way)
    by_trap = 0.5 * (system.trap - (system.trap or TRAP)) * mean_free(x).square().sum((-2, -1))
    return by_pairs.squeeze(-1) + by_trap


def integrate(system: System, points: int, **chain: int) -> dict[str, tuple[float, float]]:
    r"""The entropy :math:`S = \log Z + \langle u \rangle` of a system.

    .. math:: \log Z = \log Z_0 - \int_0^1 \langle \partial u_l / \partial l \rangle_l \, dl

    Args:
        system: of the particles.
        points: of the quadrature.
        chain: arguments of :func:`markov_chain`.

    Returns:
        "log Z", "mean energy" and "entropy", each with its standard error over the chains.
    """

    def mean(values: Tensor) -> tuple[float, float]:
        chains = values.mean(1)
        return chains.mean().item(), chains.var().item() / len(chains)

    log_z, variance = harmonic_log_z(system.freedom, system.trap or TRAP), 0.0
    for along, weight in zip(*(part.tolist() for part in gauss_legendre(points)), strict=True):
        drawn = markov_chain(between(system, along), **chain)
        value, square = mean(slope(system, along, drawn.x))
        log_z, variance = log_z - weight * value, variance + weight**2 * square
        print(
            f"at {along:.3f}: {value:.3f} ± {math.sqrt(square):.3f}, split R-hat {drawn.rhat:.3f}",
            flush=True,
        )
    energy, square = mean(system.energy(markov_chain(system, **chain).x))
    return {
        "log Z": (log_z, math.sqrt(variance)),
        "mean energy": (energy, math.sqrt(square)),
        "entropy": (log_z + energy, math.sqrt(variance + square)),
    }


def run(arguments: list[str]) -> None:
    """Prints the entropy of a system."""
    options = parser(__doc__)
    options.add_argument("--system", choices=[*SYSTEMS], default="lj13", help="of particles")
    options.add_argument("--pairs", type=float, default=1.0, help="factor of the pairs' energy")
    options.add_argument("--trap", type=float, help="k of the trap, in place of the system's own")
    options.add_argument("--points", type=int, default=32, help="of the quadrature")
    options.add_argument("--chains", type=int, default=200, help="side by side, at each point")
    options.add_argument("--draws", type=int, default=50, help="of each chain, 10 sweeps apart")
    options.add_argument("--burn", type=int, default=300, help="sweeps before the first draw")
    options.add_argument("--seed", type=int, default=0, help="of the chains")
    given = options.parse_args(arguments)
    own = SYSTEMS[given.system]
    trap = own.trap if given.trap is None else given.trap
    system = replace(own, pair=lambda squared: given.pairs * own.pair(squared), trap=trap)
    chain = {"chains": given.chains, "draws": given.draws, "burn": given.burn, "seed": given.seed}
    found = integrate(system, given.points, thin=10, **chain)
    show([{"": name, "nats": v, "standard error": e} for name, (v, e) in found.items()], own.name)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return run_recipe("recipes.flows.particles.entropy", run, arguments)


if __name__ == "__main__":
    sys.exit(main())
