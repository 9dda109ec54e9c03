"""A named builder for each variant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lipformer.models.config import LanguageModelConfig
from lipformer.models.language_model import LanguageModel


def dot_product(vocab_size: int, **options: Any) -> LanguageModel:
    """Builds the baseline: pre-norm Transformer with dot-product attention, without a certificate.

    Args:
        vocab_size: V.
        options: ``dim=128``, ``num_heads=4``, ``num_layers=3``, ``hidden=4*dim``, ``max_len=256``,
            ``dropout=0.0``, ``positions="auto"``, ``slopes=None``, ``vocabulary=None``, as in all
            builders (see :class:`LanguageModelConfig`), and ``norm_place="pre"``.
    """
    return LanguageModel(LanguageModelConfig("dot_product", vocab_size, **options))


def l2_untied(vocab_size: int, **options: Any) -> LanguageModel:
    """Builds the baseline with untied L2 attention (:class:`UntiedL2Attention`), without a certificate.

    Options: those of :func:`dot_product`.
    """
    return LanguageModel(LanguageModelConfig("l2_untied", vocab_size, **options))


def l2(vocab_size: int, **options: Any) -> LanguageModel:
    """Builds the baseline with tied, lean L2 attention: a quarter fewer attention weights or more.

    Each attention layer is certified; LayerNorm makes the certificate of the whole finite but useless.

    Options: those of :func:`dot_product`, ``value_proj=False`` and ``key_radius=None``.
    """
    return LanguageModel(LanguageModelConfig("l2", vocab_size, **options))


def contractive(vocab_size: int, **options: Any) -> LanguageModel:
    """Builds the baseline with contractive L2 attention: each layer is divided by its bound.

    ``norm`` says in which norm: "self" (default; each token's effect on itself), "l2", "token" or
    "linf". ``bound="kim2021"`` is the paper's scaling, F / UB_inf in the paper's form for max_len
    tokens, for comparison.

    Options: those of :func:`dot_product` (here ``norm_place="post"``), ``value_proj=False``,
    ``key_radius=None``, ``coeff=1.0``, ``norm="self"``, ``bound=None``.
    """
    return LanguageModel(LanguageModelConfig("contractive", vocab_size, **options))


def lipschitz(vocab_size: int, **options: Any) -> LanguageModel:
    """Builds a fully certified model: one bound from embedded tokens to logits.

    Convex residuals around branches of constant ``coeff`` and a last linear map of constant at most
    ``head_coeff``, which with the default coeff=1 bounds the whole.

    Options: those of :func:`dot_product` (here ``norm_place="none"``), ``value_proj=False``,
    ``key_radius=None``, ``coeff=1.0``, ``norm="l2"``, ``head_coeff=32.0``.
    """
    return LanguageModel(LanguageModelConfig("lipschitz", vocab_size, **options))


def invertible(vocab_size: int, **options: Any) -> LanguageModel:
    """Builds a model with invertible blocks: ``model.invert(model.hidden(x))`` is x.

    With ``norm="self"`` (default) attention is invertible token by token (Theorem E), with "l2",
    "token" or "linf" by a contraction of the whole sequence, which shrinks it more.

    Options: those of :func:`dot_product` without ``norm_place``, ``value_proj=False``,
    ``key_radius=None``, ``coeff=0.9``, ``norm="self"``.
    """
    return LanguageModel(LanguageModelConfig("invertible", vocab_size, **options))


VARIANTS: dict[str, Callable[..., LanguageModel]] = {
    builder.__name__: builder
    for builder in (dot_product, l2_untied, l2, contractive, lipschitz, invertible)
}
