"""The commands that are the Trainer's: fit, validate and test."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from training.checkpoints import CheckpointFiles, check_run
from training.data import CharacterData
from training.errors import BadInput, first_line
from training.module import LanguageModule
from training.monitors import CertificateMonitor, InversionMonitor, TextSample, Throughput
from training.progress import Progress
from training.report import Report
from training.safety import checkpoint_callbacks, terminated_is_told

# The directories that this process made for its run, until it is over.
_claimed: list[Path] = []

# How launchers tell a process which of several it is.
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")

# The least values of the Trainer's numbers that it does not check itself, or only after a while.
_LEAST = {
    "check_val_every_n_epoch": 1,
    "log_every_n_steps": 1,
    "accumulate_grad_batches": 1,
    "gradient_clip_val": 0,
    "num_sanity_val_steps": -1,
    "min_steps": 0,
    "min_epochs": 0,
}


def claim_directory(root: str | os.PathLike[str]) -> Path:
    """A new directory root/0, root/1, ...: the first that does not exist, so that no run is mixed up."""
    folder = Path(root)
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"--trainer.default_root_dir must be a directory, got the file {str(root)!r}")
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        try:
            (folder / str(number)).mkdir()
        except FileExistsError:
            number += 1
        else:
            _claimed.append(folder / str(number))
            return folder / str(number)


def loggers(root: str | Path) -> list[Logger]:
    """CSV and TensorBoard logs in a new directory; only the first process writes."""
    ranks = [int(os.environ[name]) for name in _RANKS if name in os.environ]
    version = claim_directory(root).name if not any(ranks) else "0"
    return [
        CSVLogger(root, name="", version=version),
        TensorBoardLogger(root, name="", version=version),
    ]


class SaveConfig(SaveConfigCallback):
    """The configuration of a fit, in its own directory; other commands leave no files."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Writes config.yaml."""
        if stage == "fit":
            super().setup(trainer, pl_module, stage)


class TrainingCLI(LightningCLI):
    """LightningCLI with this project's callbacks, logs and checkpoints."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the callbacks, each under a name of its own."""
        parser.add_lightning_class_args(CertificateMonitor, "certificate")
        parser.add_lightning_class_args(InversionMonitor, "inversion")
        parser.add_lightning_class_args(TextSample, "text")
        parser.add_lightning_class_args(Report, "report")
        parser.add_argument(
            "--checkpoint_every",
            type=int,
            default=200,
            help="steps between two checkpoints; a killed run goes on from the last one",
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The Trainer's methods that are commands, and which of their arguments are not options."""
        inputs = {"model", "datamodule", "weights_only", "verbose"}
        return {
            "fit": {*inputs, "train_dataloaders", "val_dataloaders"},
            "validate": {*inputs, "dataloaders"},
            "test": {*inputs, "dataloaders"},
        }

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Adds logs, checkpoints and progress bar where the configuration does not say otherwise."""
        config = self._get(self.config_init, "trainer", default={})
        _check_numbers(config)
        given = list(config.get("callbacks") or [])
        plugins = config.get("plugins") or []
        plugins = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
        extra: list[L.Callback] = [Throughput()]
        if config.get("enable_progress_bar") is not False and not _has(given, ProgressBar):
            extra.append(Progress("train/nats"))
        if self.subcommand != "fit":
            kwargs.setdefault("logger", False)
            kwargs.setdefault("enable_checkpointing", False)
        elif config.get("logger") in (None, True) and not config.get("fast_dev_run"):
            kwargs.setdefault("logger", loggers(config.get("default_root_dir") or "runs"))
        if self.subcommand == "fit" and config.get("enable_checkpointing") is not False:
            every = self._get(self.config_init, "checkpoint_every")
            if every < 1:
                raise BadInput(f"--checkpoint_every must be at least 1, got {every}")
            extra += checkpoint_callbacks(every)
        try:
            return super().instantiate_trainer(
                callbacks=given + extra, plugins=[*plugins, CheckpointFiles()], **kwargs
            )
        except (TypeError, ValueError) as error:
            raise BadInput(f"--trainer: {first_line(error)}") from error

    def _set_seed(self) -> None:
        """Seeds all generators."""
        try:
            super()._set_seed()
        except ValueError as error:
            raise BadInput(f"--seed_everything: {error}") from error

    def _parse_ckpt_path(self) -> None:
        """Looks at the checkpoint before anything is built or written."""
        command = self.config.get("subcommand")
        path = self.config[command].get("ckpt_path") if command else None
        if path is not None and "://" not in str(path) and not Path(path).is_dir():
            check_run(path, str(command))


def _check_numbers(trainer: Mapping[str, Any]) -> None:
    for name, least in _LEAST.items():
        value = trainer.get(name)
        if isinstance(value, (int, float)) and not value >= least:
            raise BadInput(f"--trainer.{name} must be at least {least}, got {value}")
    interval = trainer.get("val_check_interval")
    if isinstance(interval, (int, float)) and not interval > 0:
        raise BadInput(f"--trainer.val_check_interval must be positive, got {interval}")


def _has(callbacks: list[Any], kind: type) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)


_ABOUT = {
    "fit": "Trains a model; logs, checkpoints and a report go to a new directory.",
    "validate": "Prints nats and bits per character of the validation text.",
    "test": "Prints nats and bits per character of the test text.",
}


def _help(command: str) -> dict[str, str]:
    """A usage line in place of a page of options, and what the command does."""
    usage = f"python -m training {command} --config FILE [--ckpt_path FILE] [--OPTION VALUE ...]"
    return {"usage": usage, "description": _ABOUT[command]}


def run(arguments: list[str] | None = None) -> TrainingCLI:
    """Runs fit, validate or test; without arguments those of the command line."""
    # Before the threads start: far keys of ALiBi give denormal weights, which slow CPUs down.
    torch.set_flush_denormal(True)
    # The text is in memory: worker processes would only slow it down. A resumed run has a directory of
    # its own, which Lightning remarks on.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message="The dirpath has changed from.*")
    warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`.*")
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    try:
        with terminated_is_told():
            return _start(arguments)
    except BadInput:
        for folder in _claimed:  # nothing was trained: the number is free again
            if not (folder / "checkpoints").exists():
                shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        _claimed.clear()


def _start(arguments: list[str] | None) -> TrainingCLI:
    try:
        return TrainingCLI(
            LanguageModule,
            CharacterData,
            args=arguments,
            seed_everything_default=0,
            trainer_defaults={"enable_model_summary": False},
            # The module has an optimiser of its own.
            auto_configure_optimizers=False,
            save_config_callback=SaveConfig,
            parser_kwargs={"prog": "python -m training", **{name: _help(name) for name in _ABOUT}},
        )
    except MisconfigurationException as error:  # options that the Trainer refuses
        raise BadInput(f"--trainer: {first_line(error)}") from error
