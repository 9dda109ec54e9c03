"""Trains an AttentionFlow on sets of points in the plane and writes a report with pictures.

    python -m recipes.flows fit --config recipes/flows/moons.yaml

Without --config: the moons. Any setting can be given on the command line, for example
``--trainer.max_steps 100``; ``--out DIR`` says where everything goes, else report/flows/<data.name>.
"""

from __future__ import annotations

import shlex
import sys

from lightning.pytorch.cli import LightningArgumentParser

from recipes.cli import RecipeCLI
from recipes.flows.data import PointSets
from recipes.flows.module import FlowModule
from recipes.flows.report import Report
from recipes.output import exit_code

TRAINER = {"max_epochs": 1000, "max_steps": 600, "val_check_interval": 100}
MODEL = {"num_heads": 2, "width": 16, "hidden": [64, 64], "feed_forwards": 2, "log_det": "exact"}


def directory(out: str | None, name: str) -> str:
    """Where a run leaves everything."""
    return out or f"report/flows/{name}"


class FlowCLI(RecipeCLI):
    """The command line: one number of points for data and model, one directory for all output."""

    loss = "train/nats_per_point"

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds --out and --report.*, and says what follows from what."""
        parser.add_argument(
            "--out",
            type=str | None,
            default=None,
            help="of all output (default: report/flows/<name>)",
        )
        parser.add_lightning_class_args(Report, "report")
        parser.link_arguments("data.points", "model.points")
        parser.set_defaults({f"model.{name}": value for name, value in MODEL.items()})
        for target in ("trainer.default_root_dir", "report.directory"):
            parser.link_arguments(("out", "data.name"), target, compute_fn=directory)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    Report.command = shlex.join(["python", "-m", "recipes.flows", *arguments])

    def run() -> None:
        FlowCLI(FlowModule, PointSets, args=arguments, trainer_defaults=TRAINER)

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
