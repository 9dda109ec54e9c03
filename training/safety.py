"""An interrupted run leaves a checkpoint and says where."""

from __future__ import annotations

import math
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
from torch.distributed.tensor import DTensor

from training.errors import NotFinite, first_line


def checkpoint_callbacks(every: int) -> list[L.Callback]:
    """``last.ckpt`` after each `every` steps, and ``best.ckpt`` by validation loss."""
    last = ModelCheckpoint(
        filename="last", every_n_train_steps=every, save_top_k=1, enable_version_counter=False
    )
    best = ModelCheckpoint(
        filename="best", monitor="val/nats", save_top_k=1, enable_version_counter=False
    )
    return [last, best, SaveOnExit()]


class StopWhenNotFinite(L.Callback):
    """Ends a run whose loss or weights are infinite or not a number; nothing is saved of it.

    The loss is read where the Trainer logs it, after validations and at the end: what is not a number
    stays so. Weights are looked at before each checkpoint, so that one that was written is finite.

    Args:
        loss: what the module logs its training loss as.
    """

    def __init__(self, loss: str) -> None:
        _, _, name = loss.partition("/")
        self._losses = {stage: f"{stage}/{name}" for stage in ("train", "val", "test")}

    def _check(self, trainer: L.Trainer, stage: str) -> None:
        name = self._losses[stage]
        value = float(trainer.callback_metrics.get(name, 0.0))
        if not math.isfinite(value):
            raise NotFinite(f"{name} is {value} at step {trainer.global_step}{_advice(trainer)}")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Reads the loss with the Trainer, so that other steps wait for nothing."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and trainer.global_step % every == 0:
            self._check(trainer, "train")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reads the last loss."""
        self._check(trainer, "train")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reads what ``best.ckpt`` would be chosen by."""
        self._check(trainer, "val")

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reads the loss of the test."""
        self._check(trainer, "test")

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Looks at the weights, in each process at its own: all of them stop, or none."""
        parts = (p.to_local() if isinstance(p, DTensor) else p for p in pl_module.parameters())
        finite = all(bool(part.isfinite().all()) for part in parts)
        if not trainer.strategy.reduce_boolean_decision(finite):
            raise NotFinite(f"weights are not finite at step {trainer.global_step}{_advice(trainer)}")


def _advice(trainer: L.Trainer) -> str:
    """How to resume a run whose numbers are not finite."""
    if trainer.state.fn != "fit":
        return ""
    path = _written(trainer)
    how = f"resume with the same command and --ckpt_path {path}" if path else "no checkpoint was written"
    return f"; {how}; a smaller --model.lr or a longer --model.warmup may help"


def _written(trainer: L.Trainer) -> Path | None:
    """The run's ``last.ckpt``, ``best.ckpt`` if there is none, or nothing."""
    every = [c.best_model_path for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    return next((Path(path) for path in every if Path(path).is_file()), None)


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
        if isinstance(exception, NotFinite):
            return  # its message already says how to resume
        path = self._folder(trainer) / "interrupted.ckpt"
        failed = ""
        try:
            if trainer.world_size == 1:
                trainer.save_checkpoint(path, weights_only=False)
        except (NotFinite, OSError) as error:  # a full disk, which may be why it stopped
            failed = f" ({path.name} was not written: {first_line(error)})"
        found = path if trainer.world_size == 1 and not failed else _written(trainer)
        if trainer.is_global_zero and found is not None:
            print(
                f"\n{_reason(exception)} at step {trainer.global_step}{failed}; resume with the same "
                f"command and --ckpt_path {found}",
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
