"""Training an AttentionFlow by maximum likelihood, with Lightning."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from lipformer.flows import AttentionFlow


def optimiser(module: nn.Module, learning_rate: float, steps: int) -> dict[str, Any]:
    """Adam with a rise and a cosine fall of the learning rate, as Lightning wants it."""
    adam = torch.optim.Adam(module.parameters(), lr=learning_rate)
    # A tenth of the run; in very short ones more, since a rise of one step divides by zero in torch.
    rise = min(0.9, max(0.1, 1.5 / steps))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        adam, learning_rate, total_steps=steps, pct_start=rise
    )
    return {"optimizer": adam, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class FlowModule(L.LightningModule):
    """An AttentionFlow on sets of points in the plane, judged in nats.

    Args:
        points: of a set.
        depth: number of blocks.
        num_heads: heads of each attention.
        width: features that attention works on.
        hidden: widths between the layers of the feed-forward networks.
        feed_forwards: of them after each attention.
        coeff: contraction of every branch.
        mode: "norm" (a set: no mask, no order) or "causal" (a sequence: each point sees the earlier
            ones; its density depends on their order, though it learns from random orders).
        log_det: of the attention while training; in mode "causal" say "causal", as exact as "exact" and
            quicker. Judged it is always exact.
        linear: None, "plu" or "permutation".
        learning_rate: the largest of the schedule.
    """

    def __init__(
        self,
        points: int = 12,
        depth: int = 4,
        num_heads: int = 2,
        width: int = 16,
        hidden: list[int] | None = None,
        feed_forwards: int = 2,
        coeff: float = 0.9,
        mode: str = "norm",
        log_det: str | None = "exact",
        linear: str | None = None,
        learning_rate: float = 5e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.points = points
        self.learning_rate = learning_rate
        self.flow = AttentionFlow(
            2,
            depth=depth,
            num_heads=num_heads,
            width=width,
            hidden=[64, 64] if hidden is None else hidden,
            feed_forwards=feed_forwards,
            coeff=coeff,
            mode=mode,
            # Points come in no order, so that none is told.
            positions=None,
            seq_len=points,
            log_det=log_det,
            linear=linear,
        )

    def log_prob(self, x: Tensor) -> Tensor:
        """log p of each set (B, T, 2) with exact log-determinants, in nats, (B,)."""
        return self.flow.log_prob(x, method="causal" if self.flow.causal else "exact")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Nats per point of a batch."""
        (x,) = batch
        loss = -self.flow.log_prob(x).mean() / x.shape[1]
        self.log("train/nats_per_point", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Held-out nats, exact."""
        self._judge(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Held-out nats, exact."""
        self._judge(batch, "test")

    def _judge(self, batch: list[Tensor], stage: str) -> None:
        (x,) = batch
        nats = -self.log_prob(x).mean()
        self.log(f"{stage}/nats_per_set", nats, batch_size=len(x))
        self.log(f"{stage}/nats_per_point", nats / x.shape[1], prog_bar=True, batch_size=len(x))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Adam with one cycle over the whole run."""
        steps = int(self.trainer.estimated_stepping_batches)
        return optimiser(self, self.learning_rate, steps)  # type: ignore[return-value]
