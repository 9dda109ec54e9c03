"""The report of a fine-tuned encoder: its accuracy, its learning curve, and those of another run."""

from __future__ import annotations

import csv
import math
import statistics
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from recipes.classify.data import TextData
from recipes.output import markdown, write_csv
from recipes.report import RunReport, count
from training.errors import BadInput, first_line

Rows = list[dict[str, Any]]


def draw_curves(curves: dict[str, Rows], path: Path) -> None:
    """Accuracy against steps, a line for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, rows in curves.items():
        axes.plot(*([float(row[key]) for row in rows] for key in ("step", "accuracy")), label=name)
    axes.set(xlabel="steps of fine-tuning", ylabel="accuracy, texts for validation")
    axes.legend()
    figure.savefig(path, dpi=150)


def read_run(directory: str) -> tuple[Rows, Rows]:
    """The curve of another run and its row of the table."""
    try:
        found = []
        for name in ("curve.csv", "result.csv"):
            with (Path(directory) / name).open(encoding="utf-8", newline="") as file:
                found.append(list(csv.DictReader(file)))
        return found[0], found[1]
    except OSError as error:
        raise BadInput(
            f"--report.against must be the directory of a finished run, got {directory!r}: "
            f"{first_line(error)}"
        ) from error


class PretrainedReport(RunReport):
    """Follows accuracy and the cost of steps; after training judges the model by the test texts.

    Args:
        directory: of the report, the model and last.ckpt.
        against: the directory of another run, such as that of the unconverted encoder.
    """

    def __init__(
        self, directory: str = "report/classify/pretrained", against: str | None = None
    ) -> None:
        super().__init__(directory)
        self.against = against
        self.curve: Rows = []
        self._steps: list[float] = []
        self._clock = 0.0

    def state_dict(self) -> dict[str, Any]:
        """The curve so far, for a run that is resumed."""
        return {"curve": self.curve}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with it."""
        self.curve = state_dict["curve"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Looks for the other run before there is work to lose."""
        if self.against is not None:
            read_run(self.against)

    def on_train_batch_start(self, *_: Any) -> None:
        """Starts the clock of a step."""
        self._clock = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """Stops it."""
        self._steps.append(time.perf_counter() - self._clock)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes the accuracy, and keeps the state so far."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            accuracy = trainer.callback_metrics["val/accuracy"].item()
            self.curve.append({"step": trainer.global_step, "accuracy": accuracy})
        super().on_validation_end(trainer, pl_module)

    def write(self, module: Any, data: TextData, updates: int, seconds: float) -> str:
        """The model, the curves and the text."""
        config = module.model.config
        config.id2label = dict(enumerate(data.class_names))
        config.label2id = {name: i for i, name in config.id2label.items()}
        for part in (module.model, data.tokenizer):
            part.save_pretrained(self.directory / "model")
        name = "L2, converted" if module.hparams["convert"] else "as it was"
        result = {
            "attention": name,
            "accuracy": f"{self._accuracy(module, data):.2%}",
            "milliseconds of a step (median)": f"{1e3 * statistics.median(self._steps):.0f}",
        }
        # Fewer steps than val_check_interval: no accuracy to show, but all else is.
        self.curve = self.curve or [{"step": updates, "accuracy": math.nan}]
        curves, results = {name: self.curve}, [result]
        if self.against is not None:
            curve, others = read_run(self.against)
            curves[f"{self.against}: {others[0]['attention']}"] = curve
            results += others
        write_csv(self.directory / "curve.csv", self.curve)
        write_csv(self.directory / "result.csv", [result])
        draw_curves(curves, self.directory / "curve.png")
        return self.text(module, data, results, updates, seconds)

    @torch.no_grad()
    def _accuracy(self, module: Any, data: TextData) -> float:
        right = []
        for batch in data.test_dataloader():
            given = module.transfer_batch_to_device(batch, module.device, 0)
            right.append(module(given).argmax(1) == given.labels)
        return torch.cat(right).double().mean().item()

    def text(self, module: Any, data: TextData, results: Rows, updates: int, seconds: float) -> str:
        """The report as Markdown."""
        steps = ("converted", "layer by layer", "end to end")
        near = ", ".join(f"{c:.3f} {step}" for c, step in zip(module.cosines, steps, strict=False))
        distilled = f"Mean cosine of embeddings with the original's: {near}. " if near else ""
        load = "lipformer.load_converted" if module.hparams["convert"] else "transformers"
        return (
            f"# {data.described}: {module.pretrained}, fine-tuned\n\n"
            f"    {self.command}\n\n"
            f"{count(module):,} parameters. {distilled}{updates} updates in {seconds:.0f} s; accuracy "
            f"on {len(data.parts['test'].texts)} test texts:\n\n{markdown(results)}\n\n"
            f"- `model/`: for `{load}`, with its tokenizer.\n"
            "- `curve.png`, `curve.csv`: accuracy on texts for validation; `result.csv`: the table.\n"
            "- `last.ckpt`: the state at the end; one that an interrupted run leaves is finished by\n"
            "  `fit --ckpt_path` with the same settings. `logs/`: CSV logs and the configuration.\n"
        )
