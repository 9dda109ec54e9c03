"""Training a Vision Transformer for a large certified radius, with Lightning."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.analysis import certified_radius
from lipformer.models import VisionTransformer, VisionTransformerConfig
from recipes.margin import MarginModule, row_distances
from recipes.vision.data import ImageData

# Training images that a local gain is measured on.
_MEASURED = 64


class VisionModule(MarginModule):
    """A Vision Transformer, trained by cross-entropy on logits with a margin.

    The reach is eps times the gain from image to features: for "l2" the certificate; for "dot_product",
    which has none, the median over some training images of the gain that their certified radius
    (LoFAST) stands for, measured anew every ``gain_every`` steps.

    Args:
        config: the model; its image_size, channels, num_classes, mean and std are set by data.name.
        eps: the radius that is trained for, in the l2 norm of pixels in [0, 1].
        logit_scale: what logits are multiplied by in the loss.
        gain_every: steps between two measurements of the gain.
        lr: largest learning rate of one cycle.
        weight_decay: of linear weights.
    """

    model: VisionTransformer

    def __init__(
        self,
        config: VisionTransformerConfig,
        eps: float = 0.5,
        logit_scale: float = 10.0,
        gain_every: int = 100,
        lr: float = 1e-2,
        weight_decay: float = 0.0,
    ) -> None:
        if isinstance(config, dict):  # a checkpoint holds plain values
            config = VisionTransformerConfig.from_dict(config)
        super().__init__(VisionTransformer(config), eps, logit_scale, lr, weight_decay)
        self.save_hyperparameters(ignore="config")
        self.save_hyperparameters({"config": config.to_dict()})
        self.gain_every = gain_every

    @property
    def data(self) -> ImageData:
        """The Trainer's data module."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    @property
    def head(self) -> nn.Linear:
        """The last linear map, features to logits."""
        return self.model.head

    def measured_gain(self) -> float:
        """The gain from images to the head's input that the loss reckons with."""
        if self.model.config.variant == "l2":
            return lf.certify(self.model.body[:-1]).bound
        images, _ = self.data.images("train", _MEASURED)
        return local_gain(self.model, images.to(self.device))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Measures the gain now and then; that of "l2" depends on no weight."""
        local = self.model.config.variant == "dot_product"
        if self.gain == 0.0 or (local and self.global_step % self.gain_every == 0):
            self.gain = self.measured_gain()
            self.log("train/gain", self.gain)


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
