"""Training a classifier of texts for a large certified radius of single tokens, with Lightning."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lipformer.models import EncoderClassifier, EncoderClassifierConfig
from recipes.margin import MarginModule, add_margin


def one_token_gain(config: EncoderClassifierConfig, counts: Tensor) -> Tensor:
    r"""How far a text's features move when one of its n tokens moves by 1, at most.

    .. math:: \frac{\rho + (1 - \rho) \sqrt n}{\max(n, n_0)}, \qquad \rho = (1 - a)^L

    for L convex residuals of weight a around attention of constant 1
    (:mod:`lipformer.analysis.robustness.few_tokens`).

    Args:
        config: of the variant "l2".
        counts: n, any shape.
    """
    assert config.attention_weight is not None
    kept = (1.0 - config.attention_weight) ** config.num_layers
    return (kept + (1.0 - kept) * counts.sqrt()) / counts.clamp_min(config.least)


class TextModule(MarginModule):
    """An EncoderClassifier, trained by cross-entropy on logits with a margin.

    The margin is what logits can lose when one token moves by eps: so "margin_accuracy" is certified
    accuracy at eps, for one token. The variant "dot_product" has no certificate and no margin.

    Args:
        config: the model; its vocab_size, num_classes and max_len are the data's.
        eps: the radius that is trained for, of one token.
        logit_scale: what logits are multiplied by in the loss ("l2" only).
        lr: largest learning rate of one cycle.
        weight_decay: of linear weights.
    """

    model: EncoderClassifier

    def __init__(
        self,
        config: EncoderClassifierConfig,
        eps: float = 0.5,
        logit_scale: float = 50.0,
        lr: float = 5e-3,
        weight_decay: float = 0.01,
    ) -> None:
        if isinstance(config, dict):  # a checkpoint holds plain values
            config = EncoderClassifierConfig.from_dict(config)
        certified = config.variant == "l2"
        scale = logit_scale if certified else 1.0
        super().__init__(EncoderClassifier(config), eps, scale, lr, weight_decay)
        self.save_hyperparameters(ignore="config")
        self.save_hyperparameters({"config": config.to_dict()})

    @property
    def head(self) -> nn.Linear:
        """The last linear map, features to logits."""
        return self.model.head

    def measured_gain(self) -> float:
        """Of a text it depends on the number of tokens, see :func:`one_token_gain`; 0 without any."""
        return float(self.model.config.variant == "l2")

    def logits(self, batch: Any, reach: float) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (B, K), the same with the margin, and labels (B,)."""
        logits = self.model(batch.tokens, batch.padding)
        if reach == 0.0:
            return logits, logits, batch.labels
        counts = (~batch.padding).sum(1, keepdim=True).to(logits.dtype)
        moved = reach * one_token_gain(self.model.config, counts)
        return logits, add_margin(logits, batch.labels, self.head.weight, moved), batch.labels
