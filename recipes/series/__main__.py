"""Trains a causal AttentionFlow on windows of a series, forecasts, and writes a report with a picture.

    python -m recipes.series fit --config recipes/series/regimes.yaml

Without --config: the same series. ``--data.path FILE.csv --data.name NAME`` takes a column of numbers of
your own. ``--out DIR`` says where everything goes, else report/series/<data.name>.
"""

from __future__ import annotations

import sys

from lightning.pytorch.cli import LightningArgumentParser

from recipes.cli import RecipeCLI, run_recipe
from recipes.series.data import SeriesData
from recipes.series.module import SeriesModule
from recipes.series.report import Report

TRAINER = {"max_epochs": 1000, "max_steps": 800, "val_check_interval": 100}
MODEL = {
    "depth": 4,
    "num_heads": 2,
    "width": 32,
    "feed_forwards": 0,
    "coeff": 0.97,
    "past_bias": True,
    "lr": 0.01,
}


class SeriesCLI(RecipeCLI):
    """The command line: one past for data and model, one directory for all output."""

    loss = "train/nats_per_step"

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds --out and --report.*, and says what follows from what."""
        self.add_output(parser, Report, "report/series/{}", "data.name")
        parser.link_arguments("data.past", "model.past")
        parser.set_defaults({f"model.{name}": value for name, value in MODEL.items()})


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""

    def run(given: list[str]) -> None:
        SeriesCLI(SeriesModule, SeriesData, args=given, trainer_defaults=TRAINER)

    return run_recipe("recipes.series", run, arguments)


if __name__ == "__main__":
    sys.exit(main())
