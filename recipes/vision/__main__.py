"""Trains a Vision Transformer with a certified radius and writes a table of its accuracies.

    python -m recipes.vision fit --config recipes/vision/digits_l2.yaml

Without --config: the digits with L2 attention. Any setting can be given on the command line, for example
``--trainer.max_steps 100``; ``--out DIR`` says where all goes, else report/vision/<name>_<variant>.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser

from recipes.cli import RecipeCLI, run_recipe
from recipes.vision.data import DATASETS, ImageData
from recipes.vision.module import VisionModule
from recipes.vision.report import Report

TRAINER = {
    "max_epochs": -1,
    "max_steps": 1000,
    "val_check_interval": 200,
    "enable_model_summary": False,
}
# What is trained on the digits if nothing is said.
DIGITS = {"variant": "l2", "patch_size": 2, "dim": 32}


def _of_data(entry: str) -> Callable[[str], Any]:
    """What is known of a data set, by its name."""

    def find(name: str) -> Any:
        about = DATASETS[name]
        return [about.std] * about.channels if entry == "std" else getattr(about, entry)

    return find


class VisionCLI(RecipeCLI):
    """The command line: the data set says what images are like, one directory gets all output."""

    loss = "train/loss"

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds --out and --report.*, and says what follows from what."""
        self.add_output(parser, Report, "report/vision/{}_{}", "data.name", "model.config.variant")
        for entry in ("image_size", "channels", "num_classes", "mean", "std"):
            parser.link_arguments("data.name", f"model.config.{entry}", compute_fn=_of_data(entry))
        parser.set_defaults({f"model.config.{name}": value for name, value in DIGITS.items()})


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""

    def run(given: list[str]) -> None:
        VisionCLI(VisionModule, ImageData, args=given, trainer_defaults=TRAINER)

    return run_recipe("recipes.vision", run, arguments)


if __name__ == "__main__":
    sys.exit(main())
