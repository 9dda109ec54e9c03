"""The report of a run: curves as pictures, and a summary in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L

from training.module import LanguageModule
from training.monitors import Monitor, TextSample, Throughput
from training.progress import print_plain

_TRAIN = ("train/nats",)
_CERTIFIED = {
    "certificate/bound": "certified constant",
    "certificate/local": "certified around validation text",
    "certificate/estimate": "attack reaches",
    "certificate/local_estimate": "gain at validation text",
}
_JUDGED = ("val/nats", "val/bits", *_CERTIFIED, "inversion/error")
Row = dict[str, float]


class Report(L.Callback):
    """Collects the curves of a run and writes ``report/`` beside its logs.

    The curves are part of every checkpoint: the report of a resumed run shows all of it.

    Args:
        enabled: false to write none.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.rows: list[Row] = []
        self._written: tuple[str, Path] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The curves so far."""
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The curves of the run that is resumed."""
        self.rows = list(state_dict["rows"])

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes the loss where the Trainer logs it."""
        if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._take(trainer, _TRAIN)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Takes what validation and monitors logged."""
        if not trainer.sanity_checking:
            self._take(trainer, _JUDGED)

    def _take(self, trainer: L.Trainer, names: Sequence[str]) -> None:
        metrics = trainer.callback_metrics
        row = {name: float(metrics[name]) for name in names if name in metrics}
        if row:
            self.rows.append({"step": float(trainer.global_step), **row})

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the report, in the first process."""
        assert isinstance(pl_module, LanguageModule)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Monitor) and callback.final:
                self.rows.append({"step": float(trainer.global_step), **callback.final})
        place = trainer.log_dir  # of all processes: the first one tells the others
        if not self.enabled or place is None or not trainer.is_global_zero:
            return
        folder = Path(place) / "report"
        folder.mkdir(parents=True, exist_ok=True)
        pictures = draw(self.rows, folder)
        text = summary(self.rows, pl_module, _speed(trainer), _text(trainer), pictures)
        (folder / "report.md").write_text(text, encoding="utf-8")
        self._written = text, folder

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Prints the summary, once the progress bar is gone."""
        if self._written is not None:
            (text, folder), self._written = self._written, None
            print_plain(f"\n{text}\nreport: {folder}")


def curve(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of one curve, without what was cut."""
    points = [(row["step"], row[name]) for row in rows if not math.isnan(row.get(name, math.nan))]
    return [step for step, _ in points], [value for _, value in points]


def draw(rows: Sequence[Row], folder: Path) -> list[str]:
    """Draws loss.png, bits.png and certificate.png where there are points; returns what it drew."""
    from matplotlib.figure import Figure

    drawn = []
    pictures = {
        "loss": ("nats per character", "linear", {"train/nats": "training", "val/nats": "validation"}),
        "bits": ("bits per character", "linear", {"val/bits": "validation"}),
        "certificate": (
            "gain, embedded characters to logits",
            "log",
            _CERTIFIED,
        ),
    }
    for name, (label, scale, curves) in pictures.items():
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for key, title in curves.items():
            steps, values = curve(rows, key)
            if values:
                axes.plot(steps, values, "-" if key in _TRAIN else "o-", label=title)
        if axes.lines:
            axes.set(xlabel="step", ylabel=label, yscale=scale)
            axes.legend()
            figure.savefig(folder / f"{name}.png", dpi=120)
            drawn.append(f"{name}.png")
    return drawn


def summary(
    rows: Sequence[Row], module: LanguageModule, speed: float, text: str, pictures: Sequence[str]
) -> str:
    """The report as Markdown."""
    config = module.model.config
    parameters = sum(p.numel() for p in module.model.parameters())
    lines = [
        f"# {config.variant}: D={config.dim}, H={config.num_heads}, {config.num_layers} layers",
        "",
        "| what | value | step |",
        "|---|---|---|",
        f"| parameters | {parameters:,} | |",
    ]
    wanted = {
        "val/nats": ("validation, nats per character", "{:.4f}"),
        "val/bits": ("validation, bits per character", "{:.4f}"),
        "val/accuracy": ("validation, accuracy of the likeliest character", "{:.4f}"),
        "certificate/bound": ("certified Lipschitz constant, embedded characters to logits", "{:.6g}"),
        "certificate/estimate": ("largest gain an attack reaches (lower estimate)", "{:.6g}"),
        "certificate/local": ("certified around validation text, in a small ball", "{:.6g}"),
        "certificate/local_estimate": ("gain at validation text (lower estimate)", "{:.6g}"),
        "inversion/error": ("inversion error, largest entry", "{:.2e}"),
    }
    for name, (title, form) in wanted.items():
        steps, values = curve(rows, name)
        if values:
            lines.append(f"| {title} | {form.format(values[-1])} | {steps[-1]:.0f} |")
        elif name == "certificate/bound" and curve(rows, "certificate/estimate")[1]:
            lines.append(f"| {title} | none: the variant has no certificate | |")
        cut = [f"{row['step']:.0f}" for row in rows if math.isnan(row.get(name, 0.0))]
        if cut:
            lines.append(
                f"| {title}: validations without, for lack of time | {len(cut)} | {', '.join(cut)} |"
            )
    gains = [curve(rows, name)[1][-1:] for name in _CERTIFIED]
    if all(gains):
        (bound,), (local,), _, (gain,) = gains
        title = "certificates over that gain: of every input, of the ball"
        lines.append(f"| {title} | {bound / gain:.1f}, {local / gain:.1f} | |")
    if math.isfinite(speed):
        lines.append(f"| training, characters per second | {speed:,.0f} | |")
    if pictures:
        lines += ["", f"Pictures: {', '.join(f'`{name}`' for name in pictures)}."]
    lines.append("")
    if text:
        lines += ["What it writes:", "", "```", text, "```", ""]
    return "\n".join(lines)


def _speed(trainer: L.Trainer) -> float:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Throughput) and callback.total_seconds > 0:
            return callback.total_symbols / callback.total_seconds
    return math.nan


def _text(trainer: L.Trainer) -> str:
    texts = [c.text for c in trainer.callbacks if isinstance(c, TextSample)]  # type: ignore[attr-defined]
    return texts[0] if texts else ""
