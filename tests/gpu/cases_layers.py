"""Every layer with every option."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.layers.convert.hosts import HuggingFaceAttention
from tests.gpu.case import DRAWN, Case, Spec, by_name, new, padding, tokens


def attention(**options: Any) -> Spec:
    """L2 attention on (B, 6, 8) with two heads."""
    return new(lf.L2MultiheadAttention, 8, 2, **{"batch_first": True, "value_proj": True, **options})


def causal_mask() -> Tensor:
    """attn_mask (N, N): later keys hidden."""
    return torch.ones(6, 6, dtype=torch.bool).triu(1)


def band_mask() -> Tensor:
    """attn_mask (N, N), added: keys three or more away hidden."""
    distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()
    return torch.zeros(6, 6).masked_fill(distance > 2, -torch.inf)


def shown() -> Tensor:
    """attention_mask (B, 1, N, N) of Hugging Face: later and padded keys hidden."""
    return ~padding()[:, None, None, :] & ~causal_mask()


def cached(module: nn.Module, x: Tensor) -> Tensor:
    """Step-by-step decoding in two parts."""
    first, cache = lf.layers.step_module(module, x[:, :4])
    second, _ = lf.layers.step_module(module, x[:, 4:], cache)
    return torch.cat([first, second], dim=1)


def while_frozen(module: nn.Module, x: Tensor) -> Tensor:
    """Two calls with normalised weights computed once."""
    with lf.frozen(module):
        return module(x) + module(2 * x)


def baked(module: nn.Module, x: Tensor) -> Any:
    """The layer with plain weights."""
    return lf.bake(module)(x)


def certified(module: nn.Module, x: Tensor) -> list[float]:
    """Bounds in all norms that the layer has one in."""
    found = []
    for norm in ("l2", "token", "self", "linf"):
        try:
            found.append(lf.certify(module, seq_len=x.shape[-2], norm=norm).bound)
        except lf.NotCertifiable:
            continue
    assert found
    return found


def bounded(**options: Any) -> nn.Module:
    """A plain layer with a spectral bound."""
    return lf.spectral_bound(nn.Linear(8, 8), **options)


def dot_product() -> nn.Module:
    """torch's encoder."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def encoder(**options: Any) -> nn.Module:
    """torch's encoder, converted."""
    return lf.convert_attention(dot_product(), **options).model


def distilled(module: nn.Module, x: Tensor) -> tuple[float, ...]:
    """Two steps of each stage."""
    model = lf.convert_attention(copy.deepcopy(module)).model
    return lf.distill_attention(model, module, [x], steps=(2, 2)).losses


def weight() -> Tensor:
    return torch.randn(6, 8)


def context() -> Tensor:
    """A vector for each sample."""
    return torch.randn(2, 3)


FORMS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"value_proj": False},
    {"causal": True},
    {"causal": False},
    {"causal": True, "window": 3},
    {"causal": True, "window": 3, "value_proj": False, "positions": "alibi"},
    {"causal": True, "positions": "alibi"},
    {"causal": True, "positions": "alibi", "value_proj": False, "slopes": [0.5, 0.25]},
    {"positions": "rotary"},
    {"positions": "rotary", "value_proj": False, "causal": True},
    {"max_len": 6},
    {"proj_coeff": 0.9},
    {"proj_coeff": 0.9, "value_proj": False},
    {"key_radius": 1.5, "value_proj": False, "max_len": 6},
    {"key_radius": 1.5, "smooth_radius": True, "causal": True, "positions": "alibi"},
    {"batch_first": False},
]
PADDED: list[dict[str, Any]] = [
    {}, {"value_proj": False}, {"causal": True}, {"causal": True, "window": 3},
    {"causal": True, "positions": "alibi"}, {"positions": "rotary"},
]  # fmt: skip
QUIET: dict[str, Any] = {"need_weights": False}

CALLS = [
    *(Case(attention(**form), named=QUIET) for form in FORMS),
    *(Case(attention(**form), named={"key_padding_mask": padding, **QUIET}) for form in PADDED),
    Case(attention(), named={"need_weights": True}),
    Case(attention(value_proj=False), named={"average_attn_weights": False}),
    Case(attention(), named={"attn_mask": causal_mask, "is_causal": True, **QUIET}),
    Case(attention(any_mask=True), named={"attn_mask": band_mask, **QUIET}),
    Case(attention(dropout=0.2), named=QUIET, compared=DRAWN),
    # The mask has the layout of the weights on the CPU, and not on GPUs.
    Case(attention(dropout=0.2, causal=True, window=3), named=QUIET, compared=()),
]
NORMS = [
    *(
        Case(new(lf.Contractive, attention(max_len=6, causal=True, **form), norm=norm))
        for norm in (None, "l2", "token", "self", "linf")
        for form in ({}, {"value_proj": False}, {"value_proj": False, "positions": "alibi"})
    ),
    *(
        Case(new(lf.Contractive, new(lf.FeedForward, 8, 16, None), norm=norm))
        for norm in (None, "l2", "token", "self", "linf")
    ),
    *(
        Case(new(lf.Contractive, attention(max_len=6, causal=True, key_radius=1.5, **form), norm=norm))
        for norm in (None, "l2", "self")
        for form in ({"value_proj": False}, {"smooth_radius": True, "positions": "alibi"})
    ),
    # A bound that is a number, not a tensor.
    Case(new(lf.Contractive, new(lf.FeedForward, 8, 16), coeff=0.5)),
    Case(new(lf.Contractive, new(lf.TokenShift, 8), norm="l2")),
    Case(new(lf.Contractive, attention(value_proj=False), seq_len=6)),
    Case(
        new(lf.Contractive, attention(causal=True, max_len=6), norm="l2"),
        named={"key_padding_mask": padding},
    ),
]
CONTRACTIVE = new(
    lf.Contractive, attention(causal=True, positions="alibi", value_proj=False), norm="self"
)
PLAIN = [
    new(lf.BallProjection, 1.5),
    new(lf.CenterNorm, 8),
    new(lf.CenterNorm, 8, elementwise_affine=True),
    new(lf.FeedForward, 8, 16),
    new(lf.FeedForward, 8, 16, coeff=None, bias=False),
    new(lf.FeedForward, 8, 16, activation=new(nn.ReLU)),
    new(lf.FeedForward, 8, 16, mode="orthogonal"),
    new(lf.LipSwish),
    new(lf.MaxMin),
    new(lf.SpectralLinear, 8, 8),
    new(lf.SpectralLinear, 8, 6, bias=False, coeff=0.7, mode="normalize"),
    new(lf.SpectralLinear, 8, 6, mode="orthogonal"),
    new(bounded),
    new(bounded, coeff=0.5, mode="normalize"),
    new(encoder, max_len=6),
    new(lf.layers.PairRadial),
    new(lf.layers.PairRadial, knots=6, reach=3.0),
    new(lf.layers.SubtractMean),
    new(lf.TokenMean),
    new(lf.TokenShift, 8),
    new(lf.TokenShift, 8, shifted=2),
    new(lf.layers.PastBias, 8, new(lf.FeedForward, 8, 16)),
    new(lf.layers.TokenStack, 8, 3),
    new(lf.Residual, new(lf.FeedForward, 8, 16)),
    new(lf.ConvexResidual, new(lf.FeedForward, 8, 16), weight=0.3),
    new(lf.ConvexResidual, CONTRACTIVE),
]
LAYERS = by_name(
    [
        *CALLS,
        *NORMS,
        *(Case(spec) for spec in PLAIN),
        Case(new(lf.FeedForward, 8, 16, dropout=0.2), compared=DRAWN),
        Case(new(lf.layers.SpectralBound, 0.5, mode="normalize"), (weight,)),
        Case(
            new(lf.layers.SpectralBound, measure=lf.functional.spectral_norm_bound),
            (weight,),
            says="cap",
        ),
        Case(new(lf.Residual, CONTRACTIVE), named={"key_padding_mask": padding}),
        Case(new(lf.ConvexResidual, CONTRACTIVE), named={"key_padding_mask": padding}),
        Case(new(lf.TokenShift, 8), named={"key_padding_mask": padding}),
        Case(
            new(lf.layers.PastBias, 8, attention(causal=True, value_proj=False, max_len=6)),
            named={"key_padding_mask": padding},
        ),
        Case(new(lf.layers.TokenStack, 8, 3), named={"key_padding_mask": padding}),
        *(
            Case(new(lf.layers.NullKeyAttention, 8, 2, batch_first=True, **form), named=named)
            for form, named in (
                ({"causal": True, "max_len": 6}, {"key_padding_mask": padding}),
                ({"bias": False}, {"attn_mask": band_mask}),
            )
        ),
        Case(
            new(lf.layers.NullKeyAttention, 8, 2, dropout=0.2, batch_first=True),
            named={"is_causal": True},
            compared=DRAWN,
        ),
        Case(
            new(lf.layers.NullKeyAttention, 8, 2, batch_first=True, causal=True),
            (tokens,),
            call=cached,
            trains=False,
        ),
        Case(new(lf.layers.ContextBias, 8, 3), named={"context": context}),
        Case(new(dot_product), call=distilled, trains=False),
        Case(
            new(HuggingFaceAttention, attention(causal=True, value_proj=False), True),
            named={"attention_mask": shown},
        ),
        Case(
            new(HuggingFaceAttention, attention(any_mask=True), False), named={"attention_mask": shown}
        ),
        Case(new(lf.TokenMean, least=8), named={"key_padding_mask": padding}),
        *(
            Case(spec, call=call, trains=call is while_frozen)
            for call in (cached, while_frozen, baked, certified)
            for spec in (CONTRACTIVE, new(lf.Residual, CONTRACTIVE), new(lf.TokenShift, 8))
        ),
        *(
            Case(spec, call=call, trains=False)
            for call in (baked, certified)
            for spec in (attention(), attention(value_proj=False, proj_coeff=0.9))
        ),
        Case(
            attention(causal=True, positions="alibi", value_proj=False),
            (tokens,),
            call=cached,
            trains=False,
        ),
    ]
)
