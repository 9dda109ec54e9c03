"""Training for a large certified radius, with Lightning: a loss on logits with a margin."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from recipes.pgd import logit_margin
from training.errors import BadInput
from training.optimisers import adamw


def row_distances(weight: Tensor) -> Tensor:
    r""":math:`\|w_i - w_j\|` of the rows of a matrix, (K, F) -> (K, K), with a gradient at zero too."""
    square = (weight[:, None] - weight[None]).square().sum(-1)
    # 1e-12 keeps the root of the diagonal's zeros differentiable.
    return (square + 1e-12).sqrt()


def add_margin(logits: Tensor, labels: Tensor, weight: Tensor, reach: float | Tensor) -> Tensor:
    r"""Logits with the margin :math:`\|w_y - w_j\|\,r` added to each wrong class j.

    If features move by at most r, the margin of class y over class j shrinks by at most that: whatever
    loss is small on these logits is small on every perturbed input (Tsuzuku, Sato, Sugiyama 2018).

    Args:
        logits: (B, K).
        labels: y, (B,).
        weight: the head's, (K, F).
        reach: r, the certified or assumed change of the features.
    """
    margin = row_distances(weight)[labels] * reach
    return logits + margin.scatter(1, labels[:, None], 0.0)


class OneCycleModule(L.LightningModule):
    """A model that is trained by one cycle of the learning rate, which a checkpoint finishes.

    Args:
        model: what is trained.
        lr: largest learning rate of one cycle.
        weight_decay: of linear weights.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.lr, self.weight_decay = lr, weight_decay

    def on_train_start(self) -> None:
        """Refuses to go on past the end of the plan that a checkpoint brought with it."""
        rate = self.lr_schedulers()
        assert isinstance(rate, torch.optim.lr_scheduler.OneCycleLR)
        asked = int(self.trainer.estimated_stepping_batches)
        if asked > rate.total_steps:
            raise BadInput(
                f"--ckpt_path: that run was planned for {rate.total_steps} steps, after which its "
                f"learning rate is zero, got {asked} steps. A checkpoint finishes an interrupted run: "
                f"give --trainer.max_steps {rate.total_steps}, or begin a longer run without it"
            )

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a rise and a cosine fall of the learning rate."""
        optimiser = adamw(self.model, self.lr, self.weight_decay, (0.9, 0.99))
        steps = int(self.trainer.estimated_stepping_batches)
        # A tenth of the run; in very short ones more, since a rise of one step divides by zero in torch.
        rise = min(0.9, max(0.1, 1.5 / steps))
        rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, self.lr, total_steps=steps, pct_start=rise)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


class MarginModule(OneCycleModule):
    r"""A classifier, trained by cross-entropy on logits with a margin (:func:`add_margin`).

    The reach is eps times the gain from input to features. It rises from zero over the first half of the
    run, since at its full size the best head would at first be zero.

    Args:
        model: inputs (B, *) to logits, (B, K) or (B, N, K), the last step of which is a linear head.
        eps: the radius that is trained for, in the l2 norm of inputs.
        logit_scale: what logits are multiplied by in the loss.
        lr: largest learning rate of one cycle.
        weight_decay: of linear weights.

    Attributes:
        gain: from inputs to the head's input, as the loss reckons with it; 0 if not measured yet.
    """

    def __init__(
        self,
        model: nn.Module,
        eps: float,
        logit_scale: float,
        lr: float,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(model, lr, weight_decay)
        self.eps, self.logit_scale = eps, logit_scale
        self.gain = 0.0

    @property
    def head(self) -> nn.Linear:
        """The last linear map, features to logits."""
        raise NotImplementedError

    def measured_gain(self) -> float:
        """The gain from inputs to the head's input."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.model(x)

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Measures the gain, once."""
        if self.gain == 0.0:
            self.gain = self.measured_gain()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of the logits with the margin."""
        rise = min(1.0, 2.0 * self.global_step / self.trainer.estimated_stepping_batches)
        _, shifted, labels = self.logits(batch, self.eps * rise * self.gain)
        loss = F.cross_entropy(self.logit_scale * shifted, labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Accuracy, and accuracy with the margin (with a certified gain: certified accuracy at eps)."""
        self._evaluate(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """The same on the test data."""
        self._evaluate(batch, "test")

    def logits(self, batch: list[Tensor], reach: float) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (M, K), the same with the margin, and labels (M,), of all that has a label."""
        x, labels = batch[0], batch[1].flatten()
        logits = self.model(x).flatten(0, -2)
        return logits, add_margin(logits, labels, self.head.weight, reach), labels

    def _evaluate(self, batch: list[Tensor], stage: str) -> None:
        self.gain = self.gain or self.measured_gain()
        logits, shifted, labels = self.logits(batch, self.eps * self.gain)
        for name, found in (("accuracy", logits), ("margin_accuracy", shifted)):
            right = (logit_margin(found, labels) > 0).float().mean()
            self.log(f"{stage}/{name}", right, prog_bar=True, batch_size=len(batch[0]), sync_dist=True)
