"""Trains an AttentionFlow on sets of points in the plane and writes a report with pictures.

    python -m recipes.flows fit --config recipes/flows/moons.yaml

Without --config: the moons. Any setting can be given on the command line, for example
``--trainer.max_steps 100``; ``--out DIR`` says where everything goes, else report/flows/<data.name>.
"""

from __future__ import annotations

import sys

from lightning.pytorch.cli import LightningArgumentParser

from recipes.cli import RecipeCLI, run_recipe
from recipes.flows.data import PointSets
from recipes.flows.module import FlowModule
from recipes.flows.report import Report

TRAINER = {"max_epochs": 1000, "max_steps": 600, "val_check_interval": 100}
MODEL = {"num_heads": 2, "width": 16, "hidden": [64, 64], "feed_forwards": 2, "log_det": "exact"}


class FlowCLI(RecipeCLI):
    """The command line: one number of points for data and model, one directory for all output."""

    loss = "train/nats_per_point"

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds --out and --report.*, and says what follows from what."""
        self.add_output(parser, Report, "report/flows/{}", "data.name")
        parser.link_arguments("data.points", "model.points")
        parser.set_defaults({f"model.{name}": value for name, value in MODEL.items()})


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""

    def run(given: list[str]) -> None:
        FlowCLI(FlowModule, PointSets, args=given, trainer_defaults=TRAINER)

    return run_recipe("recipes.flows", run, arguments)


if __name__ == "__main__":
    sys.exit(main())
