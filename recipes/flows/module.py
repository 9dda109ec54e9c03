"""Training an AttentionFlow by maximum likelihood, with Lightning."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from lipformer.flows import AttentionFlow


def optimiser(module: nn.Module, lr: float, steps: int) -> dict[str, Any]:
    """Adam with a rise and a cosine fall of the learning rate, as Lightning wants it."""
    adam = torch.optim.Adam(module.parameters(), lr=lr)
    # A tenth of the run; in very short ones more, since a rise of one step divides by zero in torch.
    rise = min(0.9, max(0.1, 1.5 / steps))
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, lr, total_steps=steps, pct_start=rise)
    return {"optimizer": adam, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class DensityModule(L.LightningModule):
    """What modules of densities share: held-out nats, and Adam with one cycle over the whole run."""

    lr: float

    @abstractmethod
    def evaluate(self, batch: list[Tensor], stage: str) -> None:
        """Logs the nats of a batch."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Held-out nats."""
        self.evaluate(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Held-out nats."""
        self.evaluate(batch, "test")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """See :func:`optimiser`."""
        steps = int(self.trainer.estimated_stepping_batches)
        return optimiser(self, self.lr, steps)  # type: ignore[return-value]


class FlowModule(DensityModule):
    """An AttentionFlow on sets of points in the plane, evaluated in nats.

    `log_det` is that of training; held-out nats are always exact. In mode "causal" (a sequence: each
    point sees the earlier ones) the density depends on the order of points, though it learns from random
    orders; "causal" is then the quickest exact `log_det`.

    Args:
        points: of a set.
        lr: the largest learning rate of the schedule.
        flow: options of the AttentionFlow.
    """

    def __init__(self, points: int = 12, lr: float = 5e-3, **flow: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        # Points come in no order, so that none is told.
        self.flow = AttentionFlow(2, positions=None, seq_len=points, base=None, **flow)

    def log_prob(self, x: Tensor) -> Tensor:
        """log p of each set (B, T, 2) with exact log-determinants, in nats, (B,)."""
        return self.flow.log_prob(x, method="causal" if self.flow.causal else "exact")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Nats per point of a batch."""
        (x,) = batch
        loss = -self.flow.log_prob(x).mean() / x.shape[1]
        self.log("train/nats_per_point", loss)
        return loss

    def evaluate(self, batch: list[Tensor], stage: str) -> None:
        """Logs exact nats per set and per point."""
        (x,) = batch
        nats = -self.log_prob(x).mean()
        self.log(f"{stage}/nats_per_set", nats, batch_size=len(x))
        self.log(f"{stage}/nats_per_point", nats / x.shape[1], prog_bar=True, batch_size=len(x))
