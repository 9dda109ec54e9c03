"""The progress bar of training, and lines above it."""

from __future__ import annotations

from typing import Any

import lightning as L
import rich
from lightning.pytorch.callbacks import RichProgressBar


def print_plain(text: str) -> None:
    """Prints text as it is, above the progress bar if there is one."""
    rich.get_console().print(text, markup=False, highlight=False, soft_wrap=True)


class Progress(RichProgressBar):
    """Lightning's rich progress bar with the losses alone: the run's number is in its path.

    The training loss is read where the Trainer logs. What a module logs with `prog_bar` Lightning reads
    in each step, which makes the host wait for the GPU.

    Args:
        loss: what the module logs it as.
    """

    def __init__(self, loss: str) -> None:
        super().__init__()
        self._loss = loss
        self._read: Any = {}

    def _get_train_description(self, current_epoch: int) -> str:
        """Without the number of epochs, which is -1 in runs of a number of steps."""
        return f"Epoch {current_epoch}"

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Any:
        """The last that were read, without `v_num`."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not trainer.training or (every and trainer.global_step % every == 0):
            self._read = super().get_metrics(trainer, pl_module)
            self._read.pop("v_num", None)
            if self._loss in trainer.callback_metrics:
                self._read[self._loss] = trainer.callback_metrics[self._loss].item()
        return dict(self._read)
