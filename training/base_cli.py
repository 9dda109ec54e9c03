"""The common part of all training commands: LightningCLI with three commands and one progress bar."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningCLI

from training.errors import BadInput, first_line
from training.progress import Progress
from training.safety import StopWhenNotFinite, exit_on_sigterm


class BaseCLI(LightningCLI):
    """fit, validate and test.

    Attributes:
        loss: what the module logs its training loss as.
    """

    loss: ClassVar[str]

    def __init__(
        self, model: type[L.LightningModule], data: type[L.LightningDataModule], **kwargs: Any
    ) -> None:
        prepare_process()
        with exit_on_sigterm():
            super().__init__(
                model,
                data,
                seed_everything_default=0,
                # Modules have optimisers of their own.
                auto_configure_optimizers=False,
                # Plain values in checkpoints, so that they load without unpickling classes.
                load_from_checkpoint_support=False,
                **kwargs,
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

    def instantiate_classes(self) -> None:
        """Tells in one line what model, data or Trainer refuse.

        A checkpoint is looked for before a directory is made: Lightning's names for one ("last") would
        begin anew where it finds none.
        """
        checkpoint = self._get(self.config, "ckpt_path")
        if checkpoint and "://" not in checkpoint and not Path(checkpoint).exists():
            raise BadInput(f"--ckpt_path must be a checkpoint that exists, got {checkpoint!r}")
        try:
            super().instantiate_classes()
        except (MisconfigurationException, OSError, TypeError, ValueError) as error:
            raise BadInput(first_line(error)) from error

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Adds a bar of its own, unless the configuration says otherwise, and ends what diverges."""
        settings = self._get(self.config_init, "trainer")
        callbacks = [*(settings["callbacks"] or []), *kwargs.pop("callbacks", [])]
        callbacks.append(StopWhenNotFinite(self.loss))
        if settings["enable_progress_bar"] is not False and not any(
            isinstance(callback, ProgressBar) for callback in callbacks
        ):
            callbacks.append(Progress(self.loss))
        return super().instantiate_trainer(callbacks=callbacks, **kwargs)


def prepare_process() -> None:
    """Flushes denormals, and silences remarks that do not concern a reader of the output."""
    # Before the threads start: far keys give denormal weights, which slow CPUs down.
    torch.set_flush_denormal(True)
    for remark in (
        # The data is in memory already: worker processes would only slow it down.
        ".*does not have many workers.*",
        # A resumed run of the recipes restarts its epoch: some samples are seen again.
        ".*dataloader is not resumable.*",
        # A resumed run has a directory and callbacks of its own.
        "The dirpath has changed from.*",
        "Be aware that when using `ckpt_path`.*",
        # Lightning's own use of torch.
        ".*isinstance.treespec, LeafSpec.*",
        # LightningCLI compares the arguments it gets with those of the process.
        ".*LightningCLI's args parameter.*",
    ):
        warnings.filterwarnings("ignore", message=remark)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
