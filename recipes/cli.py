"""What the recipes' command lines share: one directory for all output."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import CSVLogger

from recipes.output import exit_code, usable_directory
from recipes.report import RunReport
from training.base_cli import BaseCLI

TRAINER: dict[str, Any] = {
    "accelerator": "auto",
    "devices": 1,
    "gradient_clip_val": 1.0,
    "check_val_every_n_epoch": None,
    "log_every_n_steps": 10,
    "num_sanity_val_steps": 0,
    # The report keeps the last weights, in a run of any length.
    "enable_checkpointing": False,
}


class RecipeCLI(BaseCLI):
    """fit, validate and test, with CSV logs beside the rest of the output."""

    def __init__(
        self,
        model: type[L.LightningModule],
        data: type[L.LightningDataModule],
        *,
        trainer_defaults: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model,
            data,
            trainer_defaults={**TRAINER, **trainer_defaults},
            save_config_kwargs={"overwrite": True},
            **kwargs,
        )

    @staticmethod
    def add_output(
        parser: LightningArgumentParser, report: type[RunReport], default: str, *settings: str
    ) -> None:
        """Adds --report.* and --out, where everything goes.

        Args:
            parser: the command's.
            report: the callback that writes the report.
            default: the directory without --out, with {} for each setting that names it.
            settings: these settings.
        """

        def directory(out: str | None, *values: str) -> str:
            return out or default.format(*values)

        named = directory(None, *(f"<{setting.rpartition('.')[2]}>" for setting in settings))
        parser.add_argument(
            "--out", type=str | None, default=None, help=f"of all output (default: {named})"
        )
        parser.add_lightning_class_args(report, "report")
        for target in ("trainer.default_root_dir", "report.directory"):
            parser.link_arguments(("out", *settings), target, compute_fn=directory)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """CSV logs in the output directory, unless asked otherwise."""
        settings = self._get(self.config_init, "trainer")
        if settings["default_root_dir"] is not None:
            usable_directory(settings["default_root_dir"])
        if settings["logger"] is None:
            kwargs["logger"] = CSVLogger(settings["default_root_dir"], name="logs")
        return super().instantiate_trainer(**kwargs)


def run_recipe(name: str, run: Callable[[list[str]], object], arguments: list[str] | None) -> int:
    """Runs the command line of a package with the process's arguments, if none are given.

    Returns:
        The exit code.
    """
    given = sys.argv[1:] if arguments is None else arguments
    RunReport.command = shlex.join(["python", "-m", name, *given])
    return exit_code(lambda: run(given))
