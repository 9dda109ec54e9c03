"""Trains a certified classifier of texts and writes a table of its accuracies.

    python -m recipes.classify fit --config recipes/classify/opinions_l2.yaml

Without --config: made-up opinions. Any setting can be given on the command line, for example
``--data.path reviews.csv --data.tokenizer characters``; ``--out DIR`` says where all goes, else
report/classify/<variant>.
"""

from __future__ import annotations

import sys

from lightning.pytorch.cli import LightningArgumentParser

from recipes.classify.data import TextData
from recipes.classify.module import TextModule
from recipes.classify.report import Report
from recipes.cli import RecipeCLI, run_recipe

TRAINER = {
    "max_epochs": -1,
    "max_steps": 400,
    "val_check_interval": 100,
    "enable_model_summary": False,
}


class TextCLI(RecipeCLI):
    """The command line: the data says how many symbols and classes there are."""

    loss = "train/loss"

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds --out and --report.*, and says what follows from what."""
        self.add_output(parser, Report, "report/classify/{}", "model.config.variant")
        parser.link_arguments("data.max_len", "model.config.max_len", compute_fn=int)
        for entry in ("vocab_size", "num_classes"):
            parser.link_arguments(f"data.{entry}", f"model.config.{entry}", apply_on="instantiate")
        parser.set_defaults({"model.config.variant": "l2"})


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""

    def run(given: list[str]) -> None:
        TextCLI(TextModule, TextData, args=given, trainer_defaults=TRAINER)

    return run_recipe("recipes.classify", run, arguments)


if __name__ == "__main__":
    sys.exit(main())
