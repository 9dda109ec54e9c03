"""Training a causal AttentionFlow on windows of a series, with Lightning."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lipformer.flows import AttentionFlow
from recipes.flows.module import DensityModule


class SeriesModule(DensityModule):
    """A causal AttentionFlow of windows (B, past + horizon, 1), judged by the future given the past.

    Args:
        past: numbers to forecast from.
        lr: the largest learning rate of the schedule.
        flow: options of the AttentionFlow.
    """

    def __init__(self, past: int = 24, lr: float = 5e-3, **flow: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.past, self.lr = past, lr
        self.flow = AttentionFlow(1, mode="causal", base=None, **flow)

    def log_prob(self, x: Tensor) -> Tensor:
        """log p(future | past) of each window (B, past + horizon, 1), in nats, (B,)."""
        return self.flow.log_prob(x[:, self.past :], prefix=x[:, : self.past])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Nats per number of whole windows: every number is a future of those before it."""
        (x,) = batch
        loss = -self.flow.log_prob(x).mean() / x.shape[1]
        self.log("train/nats_per_step", loss)
        return loss

    def evaluate(self, batch: list[Tensor], stage: str) -> None:
        """Logs nats of the future per number."""
        (x,) = batch
        nats = -self.log_prob(x).mean() / (x.shape[1] - self.past)
        self.log(f"{stage}/nats_per_step", nats, prog_bar=True, batch_size=len(x))
