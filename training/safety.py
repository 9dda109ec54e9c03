"""An interrupted run leaves a checkpoint and says where."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException


def checkpoint_callbacks(every: int) -> list[L.Callback]:
    """``last.ckpt`` after each `every` steps, and ``best.ckpt`` by validation loss."""
    last = ModelCheckpoint(
        filename="last", every_n_train_steps=every, save_top_k=1, enable_version_counter=False
    )
    best = ModelCheckpoint(
        filename="best", monitor="val/nats", save_top_k=1, enable_version_counter=False
    )
    return [last, best, SaveOnExit()]


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Ends the process with 128 + 15 after SIGTERM, as shells and schedulers expect.

    What Lightning raises then would end it with 0, like a run that is complete.
    """
    try:
        yield
    except SIGTERMException as end:
        raise SystemExit(128 + signal.SIGTERM) from end


class SaveOnExit(Checkpoint):
    """Saves a checkpoint when training ends, by itself, by Ctrl-C, by SIGTERM or by an exception.

    Ctrl-C waits for the end of the step, so that weights and optimiser are never half updated and all
    counters are those of a regular checkpoint; a second one does not wait. With several processes an
    exception of one of them leaves the last regular checkpoint: the others are not there to save with.

    Being a `Checkpoint`, it is called after all other callbacks, so that what they count or save of a
    step is done before it stops.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None
        self._training = False
        self._step = 0
        self._loop: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Takes over Ctrl-C."""
        self._training, self._step = True, trainer.global_step
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True

    def _stop_if_asked(self) -> None:
        if self._asked:
            raise KeyboardInterrupt

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stops here if asked to, as regular checkpoints are written here, and only between updates."""
        self._loop = trainer.fit_loop.state_dict()
        updated, self._step = trainer.global_step > self._step, trainer.global_step
        if updated:
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

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Leaves out a batch that was begun and not learnt from: a resumed run begins it again."""
        batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
        if self._loop and batches["ready"] > batches["processed"]:
            checkpoint["loops"]["fit_loop"] = self._loop

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves the final state as ``last.ckpt``."""
        self._release()
        trainer.save_checkpoint(self._folder(trainer) / "last.ckpt", weights_only=False)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Saves ``interrupted.ckpt`` and says how to go on."""
        if not self._training:
            return
        self._release()
        path = self._folder(trainer) / "last.ckpt"
        if trainer.world_size == 1:
            path = path.with_name("interrupted.ckpt")
            trainer.save_checkpoint(path, weights_only=False)
        if trainer.is_global_zero and path.is_file():
            print(
                f"\n{_reason(exception)} at step {trainer.global_step}; go on with the same command and "
                f"--ckpt_path {path}",
                flush=True,
            )

    def _release(self) -> None:
        self._training = self._asked = False
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    @staticmethod
    def _folder(trainer: L.Trainer) -> Path:
        """Where the run's checkpoints are."""
        assert isinstance(trainer.checkpoint_callback, ModelCheckpoint)
        return Path(str(trainer.checkpoint_callback.dirpath))


def _reason(exception: BaseException) -> str:
    if isinstance(exception, KeyboardInterrupt):
        return "interrupted"
    return "terminated" if isinstance(exception, SIGTERMException) else "stopped by an error"
