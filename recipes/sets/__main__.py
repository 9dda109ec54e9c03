"""Trains a certified classifier of points with noisy labels and writes a table of its accuracies.

    python -m recipes.sets fit --config recipes/sets/ball.yaml

Without --config: attention with keys in a ball, sets of 256 points. Any setting can be given on the
command line, for example ``--data.points 64``; ``--out DIR`` says where all goes, else
report/sets/<attention>_<points>.
"""

from __future__ import annotations

import sys

from lightning.pytorch.cli import LightningArgumentParser

from recipes.cli import RecipeCLI, run_recipe
from recipes.sets.data import NoisySets
from recipes.sets.module import SetModule
from recipes.sets.report import Report

TRAINER = {
    "max_epochs": -1,
    "max_steps": 400,
    "val_check_interval": 100,
    "enable_model_summary": False,
}


class SetCLI(RecipeCLI):
    """The command line: one number of points for data and model, one directory for all output."""

    loss = "train/loss"

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds --out and --report.*, and says what follows from what."""
        self.add_output(parser, Report, "report/sets/{}_{}", "model.attention", "data.points")
        # A plain number, which a checkpoint can hold.
        parser.link_arguments("data.points", "model.points", compute_fn=int)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""

    def run(given: list[str]) -> None:
        SetCLI(SetModule, NoisySets, args=given, trainer_defaults=TRAINER)

    return run_recipe("recipes.sets", run, arguments)


if __name__ == "__main__":
    sys.exit(main())
