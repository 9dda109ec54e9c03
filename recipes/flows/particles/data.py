"""Samples of a system of particles, drawn once by a Markov chain and kept in a file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lipformer.saving.saved_model import atomic_write
from recipes.flows.particles.systems import Drawn, System, markov_chain
from training.errors import BadInput

# Of the Markov chain: 10^5 draws to train on, 10^4 to judge by.
CHAINS = {"chains": 1_100, "draws": 100, "burn": 300, "thin": 20, "seed": 0}
# Split R-hat of the energy above this is an error.
_LARGEST_RHAT = 1.05


def draws_of(system: System, directory: Path, **options: int) -> Drawn:
    """The draws of :func:`markov_chain`, from a file of earlier ones if there is one.

    Raises:
        BadInput: the chains have not converged.
    """
    name = "-".join([system.name, *map(str, options.values())])
    path = directory / f"{name}.pt"
    if path.exists():
        kept = torch.load(path, weights_only=True)
        drawn = Drawn(kept["x"], kept["acceptance"], kept["rhat"], tuple(kept["halves"]))
    else:
        drawn = markov_chain(system, **options)
        drawn = drawn._replace(x=drawn.x.float())
        directory.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            torch.save({**drawn._asdict(), "halves": list(drawn.halves)}, part)
    if drawn.rhat > _LARGEST_RHAT:
        raise BadInput(
            f"the chains of {system.name} have not converged: split R-hat of the energy is "
            f"{drawn.rhat:.3f}, above {_LARGEST_RHAT}; let them run longer (CHAINS in data.py)"
        )
    return drawn


class Samples(NamedTuple):
    """Mean-free positions (B, N, d) to train on and, of other chains, to judge by.

    Attributes:
        train: drawn from all that the chains for training gave.
        held_out: of one chain in eleven.
        drawn: what the chains tell.
    """

    train: Tensor
    held_out: Tensor
    drawn: Drawn


def samples(system: System, count: int, choice: int, directory: Path, **options: int) -> Samples:
    """Samples of a system: ``count`` to train on, chosen by the seed ``choice``."""
    drawn = draws_of(system, directory, **{**CHAINS, **options})
    cut = max(1, len(drawn.x) // 11)
    held_out, rows = drawn.x[:cut].flatten(0, 1), drawn.x[cut:].flatten(0, 1)
    if not 5 <= count <= len(rows):  # a fifth is for validation
        raise BadInput(f"samples must be from 5 to the {len(rows)} that the chains gave, got {count}")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(choice))
    return Samples(rows[order[:count]], held_out, drawn)
