"""Trains an AttentionFlow on sets of points in the plane and writes a report with pictures.

    python -m recipes.flows fit --config recipes/flows/moons.yaml

Without --config: the moons. Any setting can be given on the command line, for example
``--trainer.max_steps 100``; ``--out DIR`` says where everything goes, else report/flows/<data.name>.
"""

from __future__ import annotations

import logging
import shlex
import sys
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger

from recipes.flows.data import PointSets
from recipes.flows.module import FlowModule
from recipes.flows.report import Report

TRAINER = {
    "accelerator": "auto",
    "devices": 1,
    "max_epochs": 1000,
    "max_steps": 600,
    "gradient_clip_val": 1.0,
    "val_check_interval": 100,
    "check_val_every_n_epoch": None,
    "log_every_n_steps": 10,
    "num_sanity_val_steps": 0,
    # The report keeps the last weights, in a run of any length.
    "enable_checkpointing": False,
}


def directory(out: str | None, name: str) -> str:
    """Where a run leaves everything."""
    return out or f"report/flows/{name}"


class FlowCLI(LightningCLI):
    """The command line: one number of points for data and model, one directory for all output."""

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
        for target in ("trainer.default_root_dir", "report.directory"):
            parser.link_arguments(("out", "data.name"), target, compute_fn=directory)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's but for predict: a flow has nothing to predict."""
        commands = LightningCLI.subcommands()
        return {name: commands[name] for name in ("fit", "validate", "test")}

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """The trainer with CSV logs in the output directory, unless another logger is asked for."""
        settings = self._get(self.config_init, "trainer")
        if settings["logger"] is None:
            kwargs["logger"] = CSVLogger(settings["default_root_dir"], name="logs")
        return super().instantiate_trainer(**kwargs)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Before the threads start: far keys give denormal weights, which slow CPUs down.
    torch.set_flush_denormal(True)
    # The data is in memory already: worker processes would only slow it down.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # A run that goes on begins its epoch anew: some sets come again, which does no harm.
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")
    # Lightning's own use of torch.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    # LightningCLI compares the arguments it gets with those of the process.
    warnings.filterwarnings("ignore", message=".*LightningCLI's args parameter.*")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    Report.command = shlex.join(["python", "-m", "recipes.flows", *arguments])
    FlowCLI(
        FlowModule,
        PointSets,
        args=arguments,
        seed_everything_default=0,
        trainer_defaults=TRAINER,
        save_config_kwargs={"overwrite": True},
        # Plain values in checkpoints, so that they load without unpickling classes.
        load_from_checkpoint_support=False,
    )


if __name__ == "__main__":
    main()
