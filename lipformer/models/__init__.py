"""Models of certified layers for language, images and sequences, and baselines.

A builder for each variant gives a :class:`LanguageModel`: ``lf.models.lipschitz(vocab_size=50)``. Its
methods are ``generate``, ``invert`` (variant "invertible"), ``save_pretrained`` and
``from_pretrained`` (docs/models.md). :class:`VisionTransformer` classifies images with a certified
radius, :class:`EncoderClassifier` texts and other sequences.
"""

from lipformer.models.builders import (
    VARIANTS,
    contractive,
    dot_product,
    invertible,
    l2,
    l2_untied,
    lipschitz,
)
from lipformer.models.causal_attention import DotProductAttention, UntiedL2Attention
from lipformer.models.config import LanguageModelConfig
from lipformer.models.converted import load_converted
from lipformer.models.encoder_classifier import EncoderClassifier
from lipformer.models.encoder_config import EncoderClassifierConfig
from lipformer.models.hugging_face import register_l2_attention
from lipformer.models.language_model import LanguageModel
from lipformer.models.self_attention import DotProductSelfAttention
from lipformer.models.vision_config import VisionTransformerConfig
from lipformer.models.vision_transformer import VisionTransformer

__all__ = [
    "VARIANTS",
    "DotProductAttention",
    "DotProductSelfAttention",
    "EncoderClassifier",
    "EncoderClassifierConfig",
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
    "load_converted",
    "register_l2_attention",
]
