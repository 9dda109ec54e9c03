"""What the recipes' command lines share: LightningCLI with one directory for all output."""

from __future__ import annotations

import logging
import warnings
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger

from recipes.output import usable_directory
from training.progress import Progress
from training.safety import terminated_is_told

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


class RecipeCLI(LightningCLI):
    """fit, validate and test, with CSV logs beside the rest of the output.

    Attributes:
        loss: what the module logs its training loss as.
    """

    loss: ClassVar[str]

    def __init__(
        self,
        model: type[L.LightningModule],
        data: type[L.LightningDataModule],
        *,
        trainer_defaults: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        prepare_process()
        with terminated_is_told():
            super().__init__(
                model,
                data,
                seed_everything_default=0,
                trainer_defaults={**TRAINER, **trainer_defaults},
                save_config_kwargs={"overwrite": True},
                # Plain values in checkpoints, so that they load without unpickling classes.
                load_from_checkpoint_support=False,
                **kwargs,
            )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's but for predict: these models have nothing to predict."""
        commands = LightningCLI.subcommands()
        return {name: commands[name] for name in ("fit", "validate", "test")}

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """CSV logs in the output directory and a bar of its own, unless asked otherwise."""
        settings = self._get(self.config_init, "trainer")
        if settings["default_root_dir"] is not None:
            usable_directory(settings["default_root_dir"])
        if settings["logger"] is None:
            kwargs["logger"] = CSVLogger(settings["default_root_dir"], name="logs")
        given = list(settings["callbacks"] or [])
        if settings["enable_progress_bar"] is not False and not any(
            isinstance(callback, ProgressBar) for callback in given
        ):
            kwargs["callbacks"] = [*given, Progress(self.loss)]
        return super().instantiate_trainer(**kwargs)


def prepare_process() -> None:
    """Flushes denormals, and silences remarks that do not concern a reader of the output."""
    # Before the threads start: far keys give denormal weights, which slow CPUs down.
    torch.set_flush_denormal(True)
    for remark in (
        # The data is in memory already: worker processes would only slow it down.
        ".*does not have many workers.*",
        # A run that goes on begins its epoch anew: some samples come again, which does no harm.
        ".*dataloader is not resumable.*",
        # Lightning's own use of torch.
        ".*isinstance.treespec, LeafSpec.*",
        # LightningCLI compares the arguments it gets with those of the process.
        ".*LightningCLI's args parameter.*",
    ):
        warnings.filterwarnings("ignore", message=remark)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
