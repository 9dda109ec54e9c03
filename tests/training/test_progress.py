"""The progress bar shows losses without a read of the device in each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from tests.training.tiny import LIGHTNING_WARNINGS, data, module, trainer, write_corpus
from training.progress import Progress


class Shown(L.Callback):
    """What the bar shows after each step."""

    def __init__(self, bar: Progress) -> None:
        self.bar, self.losses, self.true = bar, [], []  # type: ignore[var-annotated]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.losses.append(self.bar.get_metrics(trainer, pl_module).get("train/nats"))
        self.true.append(outputs["loss"].item())


@pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
def test_the_loss_is_that_of_the_last_step_that_logs(tmp_path: Path) -> None:
    bar = Progress("train/nats")
    shown = Shown(bar)
    fit = trainer(max_steps=5, log_every_n_steps=2, enable_progress_bar=True, callbacks=[bar, shown])
    fit.fit(module(variant="dot_product"), data(write_corpus(tmp_path)))
    assert fit.progress_bar_metrics.keys() <= {"val/nats", "val/bits"}, "Lightning reads these each step"
    assert shown.losses == [None, shown.true[1], shown.true[1], shown.true[3], shown.true[3]]
