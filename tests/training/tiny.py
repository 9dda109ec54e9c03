"""A tiny corpus, model and Trainer that the tests of training share."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import lightning as L

from lipformer.models import VARIANTS, LanguageModelConfig
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


def checkpoint(variant: str = "l2", **options: Any) -> dict[str, Any]:
    """What a checkpoint holds of an untrained model that knows five letters."""
    given = {"dim": 8, "num_heads": 2, "num_layers": 1, "vocabulary": "abcde", **options}
    model = VARIANTS[variant](5, **given)
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    return {"lipformer": {"config": model.config.to_dict()}, "state_dict": weights}


class Losses(L.Callback):
    """What a run's batches and validations gave, in order.

    Attributes:
        train: epoch, number of the batch, steps done after it, step it is logged as, loss.
        valid: steps done, step it is logged as, loss.
    """

    def __init__(self) -> None:
        self.train: list[tuple[int, int, int, int, float]] = []
        self.valid: list[tuple[int, int, float]] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        where = trainer.current_epoch, batch_idx, *self._steps(trainer)
        self.train.append((*where, outputs["loss"].item()))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.valid.append((*self._steps(trainer), float(trainer.callback_metrics["val/nats"])))

    def _steps(self, trainer: L.Trainer) -> tuple[int, int]:
        return trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped

    def after(self, step: int) -> tuple[list[Any], list[Any]]:
        """The batches after the one that made step number `step`, and the validations after it."""
        first = next((i for i, batch in enumerate(self.train) if batch[2] == step), -1)
        return self.train[first + 1 :], [found for found in self.valid if found[0] > step]
