"""Trains a Vision Transformer with a certified radius and writes a table of its accuracies.

    python -m recipes.vision fit --config recipes/vision/digits_l2.yaml

Without --config: the digits with L2 attention. Any setting can be given on the command line, for example
``--trainer.max_steps 100``; ``--out DIR`` says where all goes, else report/vision/<name>_<variant>.
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

from recipes.vision.data import ABOUT, ImageData
from recipes.vision.module import VisionModule
from recipes.vision.report import Report
from training.errors import BadInput

TRAINER = {
    "accelerator": "auto",
    "devices": 1,
    "max_epochs": -1,
    "max_steps": 1000,
    "gradient_clip_val": 1.0,
    "check_val_every_n_epoch": None,
    "val_check_interval": 200,
    "log_every_n_steps": 10,
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,
    # The report keeps the last weights.
    "enable_checkpointing": False,
}


def directory(out: str | None, name: str, variant: str) -> str:
    """Where a run leaves everything."""
    return out or f"report/vision/{name}_{variant}"


def _image_size(name: str) -> int:
    return _about("image_size", name)


def _channels(name: str) -> int:
    return _about("channels", name)


def _classes(name: str) -> int:
    return _about("classes", name)


def _mean(name: str) -> list[float]:
    return list(_about("mean", name))


def _std(name: str) -> list[float]:
    return [_about("std", name)] * _channels(name)


def _about(entry: str, name: str) -> Any:
    if name not in ABOUT:
        raise BadInput(f"--data.name must be one of {', '.join(ABOUT)}, got {name!r}")
    return getattr(ABOUT[name], entry)


class VisionCLI(LightningCLI):
    """The command line: the data set says what images are like, one directory gets all output."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds --out and --report.*, and says what follows from what."""
        parser.add_argument(
            "--out",
            type=str | None,
            default=None,
            help="of all output (default: report/vision/<name>_<variant>)",
        )
        parser.add_lightning_class_args(Report, "report")
        for entry, compute in (
            ("image_size", _image_size),
            ("channels", _channels),
            ("classes", _classes),
            ("mean", _mean),
            ("std", _std),
        ):
            parser.link_arguments("data.name", f"model.{entry}", compute_fn=compute)
        for target in ("trainer.default_root_dir", "report.directory"):
            parser.link_arguments(("out", "data.name", "model.variant"), target, compute_fn=directory)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's but for predict."""
        commands = LightningCLI.subcommands()
        return {name: commands[name] for name in ("fit", "validate", "test")}

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """The trainer with CSV logs in the output directory, unless another logger is asked for."""
        settings = self._get(self.config_init, "trainer")
        if settings["logger"] is None:
            kwargs["logger"] = CSVLogger(settings["default_root_dir"], name="logs")
        return super().instantiate_trainer(**kwargs)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Before the threads start: far keys give denormal weights, which slow CPUs down.
    torch.set_flush_denormal(True)
    # The data is in memory already: worker processes would only slow it down.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # A run that goes on begins its epoch anew: some images come again, which does no harm.
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")
    # Lightning's own use of torch, and of the arguments of the process.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*LightningCLI's args parameter.*")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    Report.command = shlex.join(["python", "-m", "recipes.vision", *arguments])
    try:
        VisionCLI(
            VisionModule,
            ImageData,
            args=arguments,
            seed_everything_default=0,
            trainer_defaults=TRAINER,
            save_config_kwargs={"overwrite": True},
            # Plain values in checkpoints, so that they load without unpickling classes.
            load_from_checkpoint_support=False,
            # The module has an optimiser of its own.
            auto_configure_optimizers=False,
        )
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
