"""Trains an AttentionFlow on sets of points in the plane and writes a report with pictures.

python -m recipes.flows fit --config recipes/flows/moons.yaml

Subcommands are the Trainer's methods; every setting of a YAML file can be given on the command line,
for example ``--trainer.max_steps 100``.
"""

from __future__ import annotations

import logging
import warnings

import torch
from lightning.pytorch.cli import LightningCLI

from recipes.flows.data import PointSets
from recipes.flows.module import FlowModule
from recipes.flows.report import Report  # noqa: F401  named in the YAML files


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    # Before the threads start: far keys give denormal weights, which slow CPUs down.
    torch.set_flush_denormal(True)
    # The data is in memory already: worker processes would only slow it down.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists and is not empty.*")
    # Lightning's own use of torch.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    LightningCLI(
        FlowModule,
        PointSets,
        args=arguments,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()
