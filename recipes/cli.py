"""What the recipes' command lines share: one directory for all output."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger

from recipes.output import usable_directory
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

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """CSV logs in the output directory, unless asked otherwise."""
        settings = self._get(self.config_init, "trainer")
        if settings["default_root_dir"] is not None:
            usable_directory(settings["default_root_dir"])
        if settings["logger"] is None:
            kwargs["logger"] = CSVLogger(settings["default_root_dir"], name="logs")
        return super().instantiate_trainer(**kwargs)
