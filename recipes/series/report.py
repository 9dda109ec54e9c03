"""The report of a run: forecasts of the flow and of the baselines, their scores and a picture."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from recipes.output import markdown, write_csv
from recipes.report import RunReport
from recipes.series.data import SeriesData
from recipes.series.forecasters import FlowForecaster, Forecaster, GaussianAR, MaskedFlow, crps
from recipes.series.module import SeriesModule


def score(forecaster: Forecaster, windows: Tensor, past: int, samples: int) -> dict[str, Any]:
    """Held-out nats and CRPS per number of the future, with standard errors over the windows.

    The median of the windows' CRPS says what the mean does not where a few samples are far away.
    """
    horizon = windows.shape[1] - past
    nats = -forecaster.log_prob(windows).double() / horizon
    scores = crps(forecaster.sample(windows, samples).double(), windows[:, past:, 0].double()).mean(1)

    def told(values: Tensor) -> str:
        return f"{values.mean().item():.3f} ± {values.std().item() / len(values) ** 0.5:.3f}"

    return {
        "model": forecaster.name,
        "parameters": forecaster.parameters,
        "updates": forecaster.updates or "-",
        "training, s": f"{forecaster.seconds:.0f}",
        "nats per step": told(nats),
        "CRPS": told(scores),
        "median CRPS": f"{scores.median().item():.3f}",
    }


def draw_forecasts(draws: dict[str, Tensor], windows: Tensor, past: int, path: Path) -> None:
    """Fans of quantiles against the truth, a row for each model and a column for each window.

    Args:
        draws: of each model (samples, B, horizon).
        windows: (B, past + horizon, 1).
        past: numbers of the past.
        path: of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(windows), 2.4 * len(draws)), layout="constrained")
    panels = figure.subplots(len(draws), len(windows), squeeze=False, sharex=True, sharey="col")
    truth = windows[..., 0]
    steps = torch.arange(truth.shape[1])
    levels = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=truth.dtype)
    for row, (name, samples) in zip(panels, draws.items(), strict=True):
        quantiles = samples.to(truth.dtype).quantile(levels, dim=0)  # (5, B, horizon)
        for column, axes in enumerate(row):
            low, lower, middle, upper, high = quantiles[:, column]
            axes.fill_between(steps[past:], low, high, alpha=0.2, color="C0", label="5 to 95 %")
            axes.fill_between(steps[past:], lower, upper, alpha=0.4, color="C0", label="25 to 75 %")
            axes.plot(steps[past:], middle, color="C0", linestyle="--", label="median")
            axes.plot(steps, truth[column], color="black", linewidth=1, label="truth")
            axes.axvline(past - 0.5, color="grey", linewidth=0.5)
        row[0].set_ylabel(f"{name.split(',')[0].split(' (')[0]}\nvalue, deviations", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("step", fontsize=8)
    panels[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=150)


class Report(RunReport):
    """After training fits the baselines and writes scores.csv, forecasts.png and the table.

    The masked autoregressive flow gets as many seconds of the processor as the flow, whatever else the
    machine does, and of some learning rates the one that is best on the held-out windows, which favours
    it.

    Args:
        directory: of the report and of last.ckpt.
        lrs: of the masked autoregressive flow.
        samples: drawn for each window.
        seconds: of the masked autoregressive flow's training; None for those of the flow.
    """

    def __init__(
        self,
        directory: str = "report/series",
        lrs: tuple[float, ...] = (1e-3, 3e-3),
        samples: int = 40,
        seconds: float | None = None,
    ) -> None:
        super().__init__(directory)
        self.lrs, self.samples, self.seconds = lrs, samples, seconds

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts both clocks."""
        super().on_train_start(trainer, pl_module)
        self._processor = time.process_time()

    @torch.no_grad()
    def write(self, module: SeriesModule, data: SeriesData, updates: int, seconds: float) -> str:
        """Scores, the picture and the text."""
        seconds = time.process_time() - self._processor
        budget = seconds if self.seconds is None else self.seconds
        masked = []
        for lr in self.lrs:
            print(f"training the masked autoregressive flow, {budget:.0f} s at learning rate {lr:g}")
            masked.append(MaskedFlow(data.train, data.past, budget, data.batch_size, lr))
        best = max(masked, key=lambda flow: float(flow.log_prob(data.held_out).mean()))
        models: list[Forecaster] = [FlowForecaster(module, updates, seconds)]
        models += [best, GaussianAR(data.train, data.past)]
        rows = [score(model, data.held_out, data.past, self.samples) for model in models]
        write_csv(self.directory / "scores.csv", rows)
        shown = data.held_out[:: max(1, len(data.held_out) // 3)][:3]
        draws = {model.name: model.sample(shown, self.samples) for model in models}
        draw_forecasts(draws, shown, data.past, self.directory / "forecasts.png")
        return (
            f"# {data.name}: {data.horizon} numbers after {data.past}\n\n    {self.command}\n\n"
            f"Over {len(data.held_out)} held-out windows, ± one standard error; less is better. Nats "
            "are the mean of -log p(future | past) by its length, CRPS that of "
            f"{self.samples} samples, in deviations of the series. Its median over the windows is not "
            "moved by few samples that are far away. The masked autoregressive flow was "
            "trained for as many seconds of the processor as the flow, at the better of its learning "
            "rates.\n\n"
            f"{markdown(rows)}\n\n"
            "- `forecasts.png`: quantiles of forecasts against the truth; `scores.csv`: the table.\n"
            "- `last.ckpt`: the weights, `logs/`: CSV logs and the configuration.\n"
        )
