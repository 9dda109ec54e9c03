"""Language models of every variant, classifiers, and what certificates are compared with."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lipformer as lf
from lipformer.models import (
    DotProductAttention,
    DotProductSelfAttention,
    EncoderClassifier,
    EncoderClassifierConfig,
    LanguageModel,
    LanguageModelConfig,
    UntiedL2Attention,
    VisionTransformer,
    VisionTransformerConfig,
)
from tests.gpu.case import DRAWN, EVERYWHERE, Case, by_name, new, padding, tokens
from tests.gpu.cases_flows import seeded
from tests.gpu.cases_layers import attention
from tests.models import variants


def text() -> Tensor:
    """Symbols (B, N)."""
    return torch.randint(len(variants.VOCABULARY), (2, 8))


def mask() -> Tensor:
    """Padding of text, (B, N)."""
    return padding(2, 8)


def image() -> Tensor:
    """(B, C, H, W)."""
    return torch.rand(2, 1, 8, 8)


def loss(model: LanguageModel, symbols: Tensor) -> Tensor:
    """Of a training step."""
    return F.cross_entropy(model(symbols[:, :-1]).flatten(0, 1), symbols[:, 1:].flatten())


def generate(model: LanguageModel, symbols: Tensor, **options: Any) -> Tensor:
    return model.generate(symbols, 3, generator=seeded(symbols), **options)


def inverted(model: LanguageModel, symbols: Tensor) -> Tensor:
    """Hidden tokens and back."""
    model.initialize(symbols)
    model.eval()
    with torch.no_grad():
        return model.invert(model.hidden(model.embed(symbols)))


def bound(model: Any, *_: Tensor) -> float:
    return lf.certify(model.eval()).bound


def saved(model: LanguageModel, symbols: Tensor) -> Tensor:
    """Through files, back to the device."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return type(model).from_pretrained(directory).to(symbols.device)(symbols)


def baked(model: LanguageModel, symbols: Tensor) -> Tensor:
    return lf.bake(model)(symbols)


def estimate(module: Any, x: Tensor, norm: str) -> float:
    def fn(point: Tensor) -> Tensor:
        return module(point)

    options: dict[str, Any] = {"max_iter": 20, "restarts": 2, "generator": seeded(x)}
    return lf.estimate_lipschitz(fn, x[:1], norm=norm, **options).value


def attack(module: Any, x: Tensor, norm: str) -> float:
    options: dict[str, Any] = {"steps": 1, "restarts": 1, "generator": seeded(x)}
    return lf.attack_lipschitz(module, x[:1], norm=norm, **options).value


def radius(model: VisionTransformer, images: Tensor) -> Any:
    """Certified around images, in each of the ways."""
    model.eval()
    labels = model(images).argmax(-1)
    found = lf.analysis.certified_radius(model, images, labels, tol=0.1)
    accuracy = lf.analysis.certified_accuracy(model, images, labels, [0.0, 0.1])
    return found, accuracy, lf.analysis.is_certified(model, images, labels, 0.1).double()


def few(model: EncoderClassifier, symbols: Tensor, hidden: Tensor) -> Tensor:
    """Certified radii of single tokens, with padding."""
    model.eval()
    x, labels = model.embed(symbols), model(symbols, hidden).argmax(-1)
    options: dict[str, Any] = {"tokens": 1, "key_padding_mask": hidden, "tol": 0.1}
    return lf.analysis.certified_radius(model, x, labels, theorem_l=False, **options)


@functools.cache
def _language(name: str) -> Any:
    def language_model() -> LanguageModel:
        return variants.build(name)

    language_model.__name__ = name
    return new(language_model)


def vision(variant: str, **options: Any) -> Any:
    return new(
        VisionTransformer, VisionTransformerConfig(variant, 8, 1, 4, num_classes=3, dim=8, **options)
    )


def encoder(variant: str, **options: Any) -> Any:
    sizes: dict[str, Any] = {"vocab_size": len(variants.VOCABULARY), "dim": 8, "num_layers": 1}
    return new(EncoderClassifier, EncoderClassifierConfig(variant, 3, **{**sizes, **options}))


RESIDUAL = new(lf.Residual, attention(causal=True, positions="alibi", value_proj=False))
VISION = {
    "l2": vision("l2", num_layers=1),
    "l2 pooled": vision("l2", num_layers=1, pooling="mean", readout=4, mean=(0.5,), std=(0.2,)),
    "l2 orthogonal": vision("l2", num_layers=1, feed_forward_mode="orthogonal"),
    "dot_product": vision("dot_product", num_layers=1, radius=2.0),
}
ENCODER = {
    "l2": encoder("l2", least=4),
    "l2 keys": encoder("l2", key_radius=1.0, token_shift=False, head_coeff=2.0),
    "dot_product": encoder("dot_product"),
}
MODELS = by_name(
    [
        *(Case(_language(name), (text,), call=loss) for name in variants.CASES),
        Case(
            new(LanguageModel, LanguageModelConfig("invertible", 11, 16, 2, 1, dropout=0.1)),
            (text,),
            call=loss,
            compared=DRAWN,
        ),
        *(
            Case(
                _language(name),
                (text,),
                {"temperature": t, "use_cache": c},
                generate,
                trains=False,
                compared=DRAWN if t else EVERYWHERE,
            )
            for name in variants.CASES
            for t, c in ((0.0, True), (1.0, True), (1.0, False))
            if c or name in lf.models.VARIANTS
        ),
        *(
            Case(_language(n), (text,), call=inverted, trains=False)
            for n in ("invertible", "invertible norm")
        ),
        *(Case(_language(n), (text,), call=bound, trains=False) for n in variants.CERTIFIED),
        *(Case(_language(n), (text,), call=baked, trains=False) for n in ("lipschitz", "contractive")),
        Case(_language("invertible"), (text,), call=saved, trains=False),
        *(
            Case(new(kind, 8, 2, **options))
            for kind in (DotProductAttention, UntiedL2Attention)
            for options in ({}, {"positions": "rotary"}, {"positions": None}, {"slopes": [0.5, 0.25]})
        ),
        *(
            Case(new(kind, 8, 2, dropout=0.2), compared=DRAWN)
            for kind in (DotProductAttention, UntiedL2Attention)
        ),
        Case(new(DotProductSelfAttention, 8, 2)),
        Case(new(DotProductSelfAttention, 8, 2, logit_coeff=1.0, value_coeff=1.0)),
        *(Case(spec, (image,), says=name) for name, spec in VISION.items()),
        *(Case(spec, (text, mask), says=name) for name, spec in ENCODER.items()),
        Case(encoder("l2", vocab_size=None, features=8), (tokens, padding), says="features"),
        Case(ENCODER["l2"], (text, mask), call=bound, says="bound", trains=False),
        Case(ENCODER["l2 keys"], (text, mask), call=few, says="few", trains=False),
        *(
            Case(spec, (image,), call=bound, says=f"{n} bound", trains=False)
            for n, spec in VISION.items()
            if n != "dot_product"
        ),
        *(
            Case(VISION[n], (image,), call=radius, says=f"{n} radius", trains=False)
            for n in ("l2", "dot_product")
        ),
        *(
            Case(RESIDUAL, call=call, named={"norm": norm}, trains=False, compared=DRAWN)
            for call, norms in ((estimate, ("l2", "token", "linf", "self")), (attack, ("l2", "token")))
            for norm in norms
        ),
    ]
)
