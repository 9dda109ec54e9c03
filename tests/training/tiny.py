"""A tiny corpus, model and Trainer that the tests of training share."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import lightning as L

from lipformer.models import LanguageModelConfig
from training.checkpoints import CheckpointFiles
from training.data import CharacterData
from training.module import VARIANT, LanguageModule

FIELDS = {field.name for field in dataclasses.fields(LanguageModelConfig)}

# Lightning's own use of torch and jsonargparse is deprecated there; nothing here can change it.
LIGHTNING_WARNINGS = (
    "ignore:.*isinstance.treespec, LeafSpec",
    "ignore:The dirpath has changed from",
    "ignore::DeprecationWarning",
    "ignore:.*is smaller than the logging interval",
    "ignore:.*does not have many workers",
    "ignore:Be aware that when using `ckpt_path`, callbacks used",
)


def write_corpus(folder: Path, lines: int = 60) -> Path:
    """train.txt, valid.txt and test.txt of random words."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    words = ["to", "be", "or", "not", "that", "is", "the", "question"]
    for split, count in (("train", lines), ("valid", lines // 4), ("test", lines // 4)):
        rows = [" ".join(chance.choices(words, k=chance.randint(2, 9))) for _ in range(count)]
        (folder / f"{split}.txt").write_text("\n".join(rows) + "\n")
    return folder


def module(**options: Any) -> LanguageModule:
    """A model of a few thousand weights."""
    given: dict[str, Any] = {"dim": 16, "num_heads": 2, "num_layers": 1, "max_len": 16}
    own = {name: options.pop(name) for name in [*options] if name not in FIELDS}
    config = LanguageModelConfig(options.pop("variant", VARIANT), 1, **{**given, **options})
    return LanguageModule(config, **{"warmup": 3, **own})


def data(folder: Path, **options: Any) -> CharacterData:
    """Blocks of 16, four in a batch."""
    given = {"source": "dir", "path": str(folder), "block": 16, "batch_size": 4}
    return CharacterData(**{**given, **options})  # type: ignore[arg-type]


def trainer(**options: Any) -> L.Trainer:
    """A silent Trainer on one CPU."""
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "plugins": [CheckpointFiles()],
    }
    return L.Trainer(**{**given, **options})


class Losses(L.Callback):
    """What a run's batches and validations gave, in order.

    Attributes:
        train: epoch, number of the batch, steps done after it, loss.
        valid: steps done, loss.
    """

    def __init__(self) -> None:
        self.train: list[tuple[int, int, int, float]] = []
        self.valid: list[tuple[int, float]] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        done = trainer.global_step
        self.train.append((trainer.current_epoch, batch_idx, done, outputs["loss"].item()))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.valid.append((trainer.global_step, float(trainer.callback_metrics["val/nats"])))

    def after(self, step: int) -> list[tuple[int, int, int, float]]:
        """The batches after the one that made step number `step`."""
        first = next(i for i, batch in enumerate(self.train) if batch[2] == step)
        return self.train[first + 1 :]
