"""Training a Vision Transformer for a large certified radius, with Lightning."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

import lipformer as lf
from lipformer.analysis import certified_radius
from lipformer.models import VisionTransformer, VisionTransformerConfig
from recipes.vision.data import ImageData
from recipes.vision.pgd import logit_margin
from training.errors import BadInput
from training.optimisers import adamw

# Training images that a local gain is measured on.
_MEASURED = 64


def row_distances(weight: Tensor) -> Tensor:
    r""":math:`\|w_i - w_j\|` of the rows of a matrix, (K, F) -> (K, K), with a gradient at zero too."""
    square = (weight[:, None] - weight[None]).square().sum(-1)
    # 1e-12 keeps the root of the diagonal's zeros differentiable.
    return (square + 1e-12).sqrt()


def add_margin(logits: Tensor, labels: Tensor, weight: Tensor, reach: float | Tensor) -> Tensor:
    r"""Logits with the margin :math:`\|w_y - w_j\|\,r` added to each wrong class j.

    If features move by at most r, the margin of class y over class j shrinks by at most that: whatever
    loss is small on these logits is small on every perturbed image (Tsuzuku, Sato, Sugiyama 2018).

    Args:
        logits: (B, K).
        labels: y, (B,).
        weight: the head's, (K, F).
        reach: r, the certified or assumed change of the features.
    """
    margin = row_distances(weight)[labels] * reach
    return logits + margin.scatter(1, labels[:, None], 0.0)


class VisionModule(L.LightningModule):
    r"""A Vision Transformer, trained by cross-entropy on logits with a margin.

    The reach is eps times the gain from image to features: for "l2" the certificate; for "dot_product",
    which has none, the median over some training images of the gain that their certified radius
    (LoFAST) stands for, measured anew every ``gain_every`` steps. It rises from zero over the first half
    of the run, since at its full size the best head would at first be zero.

    Args:
        config: the model; its image_size, channels, num_classes, mean and std are set by data.name.
        eps: the radius that is trained for, in the l2 norm of pixels in [0, 1].
        logit_scale: what logits are multiplied by in the loss.
        gain_every: steps between two measurements of the gain.
        lr: largest learning rate of one cycle.
        weight_decay: of linear weights.
    """

    def __init__(
        self,
        config: VisionTransformerConfig,
        eps: float = 0.5,
        logit_scale: float = 10.0,
        gain_every: int = 100,
        lr: float = 1e-2,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__()
        if isinstance(config, dict):  # a checkpoint holds plain values
            config = VisionTransformerConfig.from_dict(config)
        self.save_hyperparameters(ignore="config")
        self.save_hyperparameters({"config": config.to_dict()})
        self.eps, self.logit_scale, self.gain_every = eps, logit_scale, gain_every
        self.lr, self.weight_decay = lr, weight_decay
        self.model = VisionTransformer(config)
        self.gain = 0.0

    @property
    def data(self) -> ImageData:
        """The Trainer's data module."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def forward(self, images: Tensor) -> Tensor:
        """Logits: (B, C, H, W) -> (B, K)."""
        return self.model(images)

    def measured_gain(self) -> float:
        """The gain from images to the head's input that the loss reckons with."""
        if self.model.config.variant == "l2":
            return lf.certify(self.model.body[:-1]).bound
        images, _ = self.data.images("train", _MEASURED)
        return local_gain(self.model, images.to(self.device))

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

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Measures the gain now and then; that of "l2" depends on no weight."""
        local = self.model.config.variant == "dot_product"
        if self.gain == 0.0 or (local and self.global_step % self.gain_every == 0):
            self.gain = self.measured_gain()
            self.log("train/gain", self.gain)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of the logits with the margin."""
        images, labels = batch
        rise = min(1.0, 2.0 * self.global_step / self.trainer.estimated_stepping_batches)
        reach = self.eps * rise * self.gain
        logits = add_margin(self.model(images), labels, self.model.head.weight, reach)
        loss = F.cross_entropy(self.logit_scale * logits, labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Accuracy, and accuracy with the margin (for "l2": certified accuracy at eps)."""
        self._evaluate(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """The same on the test images."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: list[Tensor], stage: str) -> None:
        images, labels = batch
        logits = self.model(images)
        self.gain = self.gain or self.measured_gain()
        shifted = add_margin(logits, labels, self.model.head.weight, self.eps * self.gain)
        for name, found in (("accuracy", logits), ("margin_accuracy", shifted)):
            right = (logit_margin(found, labels) > 0).float().mean()
            self.log(f"{stage}/{name}", right, prog_bar=True, batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a rise and a cosine fall of the learning rate."""
        optimiser = adamw(self.model, self.lr, self.weight_decay, (0.9, 0.99))
        steps = int(self.trainer.estimated_stepping_batches)
        # A tenth of the run; in very short ones more, since a rise of one step divides by zero in torch.
        rise = min(0.9, max(0.1, 1.5 / steps))
        rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, self.lr, total_steps=steps, pct_start=rise)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


@torch.no_grad()
def local_gain(model: VisionTransformer, images: Tensor) -> float:
    r"""The median gain from image to features that certified radii stand for.

    A radius r is where :math:`\min_j (f_y - f_j) / \|w_y - w_j\| = g r`, which gives g; y is whatever
    class is predicted, right or wrong. Without any radius it is the gain of everything but attention.
    """
    was_training = model.training
    model.eval()
    try:
        logits = model(images)
        predicted = logits.argmax(1)
        radius = certified_radius(model, images, predicted).double()
    finally:
        model.train(was_training)
    distances = row_distances(model.head.weight)[predicted]
    margins = logits.gather(1, predicted[:, None]) - logits
    ratio = (margins / distances).scatter(1, predicted[:, None], torch.inf).amin(1).double()
    gains = (ratio / radius)[(radius > 0) & torch.isfinite(radius)]
    if gains.numel() == 0:
        assert model.config.std is not None
        return 1.0 / min(model.config.std)
    return gains.median().item()
