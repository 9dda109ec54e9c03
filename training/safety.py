"""An interrupted run leaves a checkpoint and says where."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


def checkpoint_callbacks(every: int) -> list[L.Callback]:
    """``last.ckpt`` after each `every` steps, and ``best.ckpt`` by validation loss."""
    last = ModelCheckpoint(
        filename="last", every_n_train_steps=every, save_top_k=1, enable_version_counter=False
    )
    best = ModelCheckpoint(
        filename="best", monitor="val/nats", save_top_k=1, enable_version_counter=False
    )
    return [last, best, Safety()]


class Safety(L.Callback):
    """Saves a checkpoint when training ends, by itself, by Ctrl-C or by an exception.

    Ctrl-C waits for the end of the step, so that weights and optimiser are never half updated; a second
    one does not wait. With several processes an exception of one of them leaves the last regular
    checkpoint: the others are not there to save with.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None
        self._training = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Takes over Ctrl-C."""
        self._training = True
        self._asked = False
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True

    def _stop_if_asked(self) -> None:
        if self._asked:
            raise KeyboardInterrupt

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Here every count and weight is that of whole steps."""
        self._stop_if_asked()

    def on_validation_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """A long validation need not be waited for."""
        self._stop_if_asked()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves the final state as ``last.ckpt``."""
        self._release()
        folder = self._folder(trainer)
        if folder is not None:
            trainer.save_checkpoint(folder / "last.ckpt", weights_only=False)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Saves ``interrupted.ckpt`` and says how to go on."""
        if not self._training:
            return
        self._release()
        folder = self._folder(trainer)
        if folder is None:
            return
        path = folder / "interrupted.ckpt"
        if trainer.world_size == 1:
            trainer.save_checkpoint(path, weights_only=False)
        else:
            path = folder / "last.ckpt"
        if trainer.is_global_zero and path.is_file():
            what = "interrupted" if isinstance(exception, KeyboardInterrupt) else "stopped by an error"
            print(
                f"\n{what} at step {trainer.global_step}; go on with the same command and "
                f"--ckpt_path {path}",
                flush=True,
            )

    def _release(self) -> None:
        self._training = False
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    @staticmethod
    def _folder(trainer: L.Trainer) -> Path | None:
        """Where the run's checkpoints are; None if it keeps none."""
        folder = trainer.checkpoint_callback.dirpath if trainer.checkpoint_callbacks else None  # type: ignore[union-attr]
        return None if folder is None else Path(folder)
