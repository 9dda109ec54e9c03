"""Language models and Vision Transformers of certified layers, and the ones to compare them with.

A builder for each variant gives a :class:`LanguageModel`: ``lf.models.lipschitz(vocab_size=50)``. Its
``generate``, ``invert`` (variant "invertible"), ``save_pretrained`` and ``from_pretrained`` do
the rest. See docs/models.md. :class:`VisionTransformer` classifies images with a certified radius.
"""

from lipformer.models._builders import (
    VARIANTS,
    contractive,
    dot_product,
    invertible,
    l2,
    l2_untied,
    lipschitz,
)
from lipformer.models._causal_attention import DotProductAttention, UntiedL2Attention
from lipformer.models._config import LanguageModelConfig
from lipformer.models._language_model import LanguageModel
from lipformer.models._self_attention import DotProductSelfAttention
from lipformer.models._vision_config import VisionTransformerConfig
from lipformer.models._vision_transformer import VisionTransformer

__all__ = [
    "VARIANTS",
    "DotProductAttention",
    "DotProductSelfAttention",
    "LanguageModel",
    "LanguageModelConfig",
    "UntiedL2Attention",
    "VisionTransformer",
    "VisionTransformerConfig",
    "contractive",
    "dot_product",
    "invertible",
    "l2",
    "l2_untied",
    "lipschitz",
]
