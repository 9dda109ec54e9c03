"""Series of numbers, cut into windows: a past to forecast from and a future to forecast."""

from __future__ import annotations

import csv
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from training.batches import for_gpu


def regimes(length: int, seed: int = 0) -> Tensor:
    r"""A series that no Gaussian autoregression fits, (length,).

    Two hidden regimes that last 25 steps in the mean. In the calm one
    :math:`x_t = 0.9 x_{t-1} + 0.15 (e_t - 1)`, in the other
    :math:`x_t = 2 - 0.5 x_{t-1} - 0.6 (e_t - 1)`, with :math:`e_t` exponential of mean 1: skewed upwards
    here, downwards and four times as wide there, around another level, and with turns. What comes next
    depends on the regime, which the past tells.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):
        noise = torch.empty(length).exponential_(generator=generator) - 1.0
        switch = torch.rand(length, generator=generator) < 1.0 / 25.0
    wild = (switch.long().cumsum(0) % 2).bool()
    values, x = [], 0.0
    for e, w in zip(noise.tolist(), wild.tolist(), strict=True):
        x = 2.0 - 0.5 * x - 0.6 * e if w else 0.9 * x + 0.15 * e
        values.append(x)
    return torch.tensor(values)


def read_series(path: str, column: str | None) -> Tensor:
    """The numbers of a column of a CSV file with a header, by default of its last one."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} has no rows below its header")
    names = list(rows[0])
    name = names[-1] if column is None else column
    if name not in names:
        raise ValueError(f"{path} has the columns {', '.join(names)}, got column={name!r}")
    return torch.tensor([float(row[name]) for row in rows])


class SeriesData(L.LightningDataModule):
    """Windows (past + horizon, 1) of one series in units of the training part's deviation.

    The first four fifths are trained on, in all windows; the last fifth is judged by, in windows whose
    futures do not overlap. ``mean`` and ``deviation`` of the training part bring forecasts back to the
    units of the series.

    Args:
        name: of the data, for the report.
        path: of a CSV file; None for :func:`regimes`.
        column: of the CSV file; None for the last.
        length: of the synthetic series.
        past: numbers to forecast from.
        horizon: numbers to forecast.
        batch_size: windows of a batch.
        seed: of the synthetic series.
    """

    def __init__(
        self,
        name: str = "regimes",
        path: str | None = None,
        column: str | None = None,
        length: int = 20_000,
        past: int = 24,
        horizon: int = 8,
        batch_size: int = 128,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.name, self.past, self.horizon, self.batch_size = name, past, horizon, batch_size
        series = regimes(length, seed) if path is None else read_series(path, column)
        if not bool(torch.isfinite(series).all()):
            raise ValueError(f"the series has {int((~torch.isfinite(series)).sum())} numbers not finite")
        cut, size = len(series) * 4 // 5, past + horizon
        if min(cut, len(series) - cut) < size:
            raise ValueError(
                f"a fifth of the series must hold a window of past + horizon = {size}, got "
                f"{len(series)} numbers"
            )
        self.mean, self.deviation = float(series[:cut].mean()), float(series[:cut].std())
        series = (series - self.mean) / self.deviation
        self.train = series[:cut].unfold(0, size, 1).unsqueeze(-1).contiguous()
        self.held_out = series[cut:].unfold(0, size, horizon).unsqueeze(-1).contiguous()

    def _batches(self, windows: Tensor, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
        pinned = for_gpu(self)
        return DataLoader(TensorDataset(windows), self.batch_size, shuffle, pin_memory=pinned)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Batches [x] with x (B, past + horizon, 1), in random order."""
        return self._batches(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """A part of the held-out windows, to follow the training."""
        return self._batches(self.held_out[:256])

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """All held-out windows."""
        return self._batches(self.held_out)
