"""The callback that keeps the state of a recipe's run and writes its report in the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor, nn

from recipes.output import write_text


def count(module: nn.Module) -> int:
    """Trained numbers of a module."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def draw_accuracy(radius: Tensor, attacked: dict[float, float], path: Path, unit: str) -> None:
    """Accuracy against eps: the certified curve, and points of an attack.

    Args:
        radius: certified radii, any shape, on the CPU; 0 where an answer is wrong.
        attacked: accuracy under attack for each eps.
        path: of the picture.
        unit: what eps is.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    grid = torch.linspace(0.0, max(attacked), 200, dtype=torch.float64)
    certified = [(radius.double() >= max(eps, 1e-12)).double().mean().item() for eps in grid.tolist()]
    axes.plot(grid.tolist(), certified, label="certified")
    axes.plot(list(attacked), list(attacked.values()), "o--", label="PGD attack")
    axes.set(xlabel=unit, ylabel="accuracy", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=150)


class RunReport(L.Callback):
    """Keeps last.ckpt at each validation; after training writes a report, in the first process only.

    Args:
        directory: of the report and of last.ckpt.

    Attributes:
        command: the command line of the run, for the report.
    """

    command: ClassVar[str] = "python -m recipes"

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self._begin = 0.0

    def write(self, module: Any, data: Any, updates: int, seconds: float) -> str:
        """Writes all but the text of the report, which it returns.

        Args:
            module: what was trained, in eval mode.
            data: the data module.
            updates: of the optimiser.
            seconds: of training.
        """
        raise NotImplementedError

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the clock."""
        self._begin = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keeps the state so far, in case the run is broken off."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            trainer.save_checkpoint(self.directory / "last.ckpt", weights_only=False)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keeps the weights and writes the report."""
        seconds = time.perf_counter() - self._begin
        trainer.save_checkpoint(self.directory / "last.ckpt", weights_only=False)
        if trainer.is_global_zero:
            data = trainer.datamodule  # type: ignore[attr-defined]
            text = self.write(pl_module.eval(), data, trainer.global_step, seconds)
            write_text(self.directory / "report.md", text)
            print(f"\n{text}\nwritten to {self.directory}")
