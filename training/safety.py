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
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException


def checkpoint_callbacks(every: int) -> list[L.Callback]:
    """``last.ckpt`` after each `every` steps, and ``best.ckpt`` by validation loss."""
    last = ModelCheckpoint(
        filename="last", every_n_train_steps=every, save_top_k=1, enable_version_counter=False
    )
    best = ModelCheckpoint(
        filename="best", monitor="val/nats", save_top_k=1, enable_version_counter=False
    )
    return [last, best, Safety()]


@contextmanager
def terminated_is_told() -> Iterator[None]:
    """Ends the process with 128 + 15 after SIGTERM, as shells and schedulers expect.

    What Lightning raises then would end it with 0, like a run that is complete.
    """
    try:
        yield
    except SIGTERMException as end:
        raise SystemExit(128 + signal.SIGTERM) from end


class Safety(L.Callback):
    """Saves a checkpoint when training ends, by itself, by Ctrl-C or by an exception.

    Ctrl-C waits for the end of the step, so that weights and optimiser are never half updated and all
    counters are those of a regular checkpoint; a second one does not wait. With several processes an
    exception of one of them leaves the last regular checkpoint: the others are not there to save with.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None
        self._training = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Becomes the last callback: what the others count or save of a step is done before it stops."""
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [*others, self]  # type: ignore[attr-defined]

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

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Where regular checkpoints are written, too; gradients that are being summed up are in none."""
        if not trainer.fit_loop.epoch_loop._should_accumulate():
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
            _forget_begun_batch(trainer)
            trainer.save_checkpoint(path, weights_only=False)
        else:
            path = folder / "last.ckpt"
        if trainer.is_global_zero and path.is_file():
            what = _reason(exception)
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


def _reason(exception: BaseException) -> str:
    if isinstance(exception, KeyboardInterrupt):
        return "interrupted"
    return "terminated" if isinstance(exception, SIGTERMException) else "stopped by an error"


def _forget_begun_batch(trainer: L.Trainer) -> None:
    """Sets the counters of a batch that an error ended before its update back to the batch before.

    Lightning counts a batch as ready before it is learnt from. Saved like that, a resumed run would log
    and validate one step early. The counters become those of the end of the last whole batch, where
    regular checkpoints are saved and from where Lightning goes on rightly. The first batch of an epoch
    has none before it: the resumed run then learns the same, with step numbers that may be off by one.
    """
    loop = trainer.fit_loop.epoch_loop
    done = loop.batch_progress.current.completed
    processed = vars(loop.batch_progress.current)["processed"]
    if done == 0 or processed != done or loop.batch_progress.current.ready == done:
        return
    for progress in (loop.batch_progress.current, loop.batch_progress.total):
        whole = progress.completed
        vars(progress).update(ready=whole, started=whole, processed=whole, completed=whole - 1)
    if not loop._should_accumulate():
        loop._batches_that_stepped -= 1
