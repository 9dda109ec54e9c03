"""Language models made of certified layers, and the ones to compare them with.

A builder for each variant gives a :class:`LanguageModel`: ``lf.models.lipschitz(vocab_size=50)``. Its
``generate``, ``invert`` (variant "invertible"), ``save_pretrained`` and ``from_pretrained`` do
the rest. See docs/models.md.
"""

from lipformer.models._builders import (
    VARIANTS,
    contractive,
    dot_product,
    invertible,
    l2,
    l2_tied,
    lipschitz,
)
from lipformer.models._causal_attention import DotProductAttention, UntiedL2Attention
from lipformer.models._config import LanguageModelConfig
from lipformer.models._language_model import LanguageModel

__all__ = [
    "VARIANTS",
    "DotProductAttention",
    "LanguageModel",
    "LanguageModelConfig",
    "UntiedL2Attention",
    "contractive",
    "dot_product",
    "invertible",
    "l2",
    "l2_tied",
    "lipschitz",
]
