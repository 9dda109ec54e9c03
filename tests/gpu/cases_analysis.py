"""The functions of `lipformer.analysis` and `lipformer.functional`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer import analysis, functional
from lipformer.analysis.bounds.local import METHODS
from lipformer.functional.spectral import bound as _spectral
from tests.gpu.case import DRAWN, Case, by_name, new, padding, tokens
from tests.gpu.cases_flows import seeded


def heads() -> Tensor:
    """(B, H, N, d)."""
    return torch.randn(2, 2, 6, 4)


def weights() -> Tensor:
    """A measure on tokens."""
    return torch.rand(6) + 0.1


def bias() -> Tensor:
    """Additive on the logits, with a zero diagonal."""
    given = -torch.rand(6, 6)
    return given - given.diag().diag()


def matrices() -> Tensor:
    """Too large for the dense eigenvector."""
    return torch.randn(2, 100, 80)


def by_squaring(bound: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
    """The candidate of a spectral norm as GPUs find it."""
    with mock.patch.object(_spectral, "_squares", return_value=True):
        return bound(weight)


def by_lanczos(bound: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
    """The candidate of a spectral norm as the CPU finds it for large weights."""
    with mock.patch.object(_spectral, "_squares", return_value=False):
        return bound(weight)


def slopes() -> Tensor:
    return torch.tensor([0.5, 0.25])


def temperature() -> Tensor:
    return torch.rand(2, 1, 1) + 0.5


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


ATTENTION = new(nn.MultiheadAttention, 8, 2, batch_first=True)
# What is called with attention, tokens (B, N, D) and weights (N,).
CALLS: dict[str, Callable[..., Any]] = {
    "adversarial_measure": lambda m, x, a: analysis.adversarial_measure(m, 1.0)[0],
    "adversarial_tokens": lambda m, x, a: analysis.adversarial_tokens(m, 4, 1.0),
    "attention_maps": lambda m, x, a: analysis.attention_maps(m)(x.double()),
    "ball_bound": lambda m, x, a: [analysis.ball_bound(m, 6, 1.0, causal=c) for c in (False, True)],
    "ball_lower_bound": lambda m, x, a: analysis.ball_lower_bound(m, 6, 1.0),
    "jasmin_loss": lambda m, x, a: analysis.jasmin_loss(m, x),
    "local_bound": lambda m, x, a: [
        analysis.local_bound(m, x, method=method) for method in ("min", *METHODS)
    ],
    "lofast_bound": lambda m, x, a: analysis.lofast_bound(m, x, 0.1),
    "mean_field_bound": lambda m, x, a: analysis.mean_field_bound(m, 1.0),
    "mean_field_lower_bound": lambda m, x, a: analysis.mean_field_lower_bound(m, 1.0),
    "measure_attention": lambda m, x, a: analysis.measure_attention(m, x, a),
    "measure_gain": lambda m, x, a: analysis.measure_gain(m, x, a),
    "split_gain": lambda m, x, a: analysis.split_gain(m, x, a),
    "split_attack": lambda m, x, a: analysis.split_attack(m, x[0], a).gain,
}


def measure_gain_estimate(attn: Any, x: Tensor, weights: Tensor) -> Tensor:
    return analysis.measure_gain_estimate(attn, x[0], weights, generator=seeded(x))


def layer_gains(model: Any, x: Tensor) -> list[float]:
    return [row.gain for row in analysis.layer_gains(model, x, generator=seeded(x)).rows]


def probe_attention(model: Any, x: Tensor) -> list[Tensor]:
    return [probe(probe.tokens) for probe in analysis.probe_attention(model.eval(), x[0])]


def layer_norm_radius(norm: Any, x: Tensor) -> float:
    return analysis.layer_norm_radius(norm)


def perturbation_bound(module: Any, x: Tensor) -> Any:
    return analysis.perturbation_bound(module, x, 0.1)


ATTENTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "slopes": slopes, "scale": temperature},
    {"is_causal": True, "window": 2, "key_padding_mask": padding},
    {"bias": bias, "scale": 0.5},
]
ANALYSIS = by_name(
    [
        *(
            Case(ATTENTION, (tokens, weights), {}, call, trains=False, says=name)
            for name, call in CALLS.items()
        ),
        Case(ATTENTION, (tokens, weights), {}, measure_gain_estimate, trains=False, compared=DRAWN),
        Case(new(encoder), call=layer_gains, trains=False, compared=DRAWN),
        Case(new(encoder), call=probe_attention, trains=False),
        Case(new(nn.LayerNorm, 8), call=layer_norm_radius, trains=False),
        Case(
            new(nn.Sequential, new(lf.CenterNorm, 8), new(nn.Linear, 8, 8)),
            call=perturbation_bound,
            trains=False,
        ),
        *(Case(functional.l2_attention, (heads,), named) for named in ATTENTIONS),
        *(
            Case(functional.l2_attention_weights, (heads,), named)
            for named in ({}, {"is_causal": True, "slopes": slopes}, {"bias": bias})
        ),
        Case(functional.l2_attention_step, (heads,), {"queries": 2, "slopes": slopes}),
        Case(
            functional.null_key_attention,
            (heads, heads, heads),
            {"scale": temperature, "is_causal": True, "key_padding_mask": padding},
        ),
        Case(functional.null_key_attention, (heads, heads, heads), {"scale": 0.3, "value_scale": 0.5}),
        *(
            Case(functional.spectral_norm_bound, (tokens,), {"method": method}, trains=method != "svd")
            for method in ("cholesky", "gram", "svd")
        ),
        *(
            Case(functional.spectral_norm_bound, (matrices,), call=way)
            for way in (by_squaring, by_lanczos)
        ),
        Case(functional.l2_gain, (lambda: 6,), {"bias": bias}, trains=False),
    ]
)
