"""The functions of `lipformer.analysis` and `lipformer.functional`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer import analysis, functional
from tests.gpu.case import Case, by_name, new, padding, tokens
from tests.gpu.cases_flows import seeded
from tests.gpu.cases_layers import causal_mask


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


def slopes() -> Tensor:
    return torch.tensor([0.5, 0.25])


def temperature() -> Tensor:
    return torch.rand(2, 1, 1) + 0.5


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


class Function(nn.Module):
    """A function as a module, to be described."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


ATTENTION = new(nn.MultiheadAttention, 8, 2, batch_first=True)
CALLS: dict[str, Callable[..., Any]] = {
    "adversarial_measure": lambda m, x: analysis.adversarial_measure(m, 1.0)[0],
    "adversarial_tokens": lambda m, x: analysis.adversarial_tokens(m, 4, 1.0),
    "attention_maps": lambda m, x: analysis.attention_maps(m)(x.double()),
    "ball_bound": lambda m, x: [analysis.ball_bound(m, 6, 1.0, causal=c) for c in (False, True)],
    "ball_lower_bound": lambda m, x: analysis.ball_lower_bound(m, 6, 1.0),
    "jasmin_loss": lambda m, x: analysis.jasmin_loss(m, x),
    "local_bound": lambda m, x: [
        analysis.local_bound(m, x, method=method) for method in ("min", *analysis._local.METHODS)
    ],
    "lofast_bound": lambda m, x: analysis.lofast_bound(m, x, 0.1),
    "mean_field_bound": lambda m, x: analysis.mean_field_bound(m, 1.0),
    "mean_field_lower_bound": lambda m, x: analysis.mean_field_lower_bound(m, 1.0),
    "measure_attention": lambda m, x, a: analysis.measure_attention(m, x, a),
    "measure_gain": lambda m, x, a: analysis.measure_gain(m, x, a),
    "measure_gain_estimate": lambda m, x, a: analysis.measure_gain_estimate(
        m, x[0], a, generator=seeded(x)
    ),
    "split_gain": lambda m, x, a: analysis.split_gain(m, x, a),
    "split_attack": lambda m, x, a: analysis.split_attack(m, x[0], a).gain,
}
OTHERS = [
    Case(new(encoder), says="layer_gains", trains=False, call=lambda m, x: [
        row.gain for row in analysis.layer_gains(m, x, generator=seeded(x)).rows
    ]),
    Case(new(encoder), says="probe_attention", trains=False, call=lambda m, x: [
        probe(probe.tokens) for probe in analysis.probe_attention(m.eval(), x[0])
    ]),
    Case(new(nn.LayerNorm, 8), says="layer_norm_radius", trains=False, call=lambda m, x: (
        analysis.layer_norm_radius(m)
    )),
    Case(new(nn.Sequential, new(lf.CenterNorm, 8), new(nn.Linear, 8, 8)), says="perturbation_bound",
         trains=False, call=lambda m, x: analysis.perturbation_bound(m, x, 0.1)),
]  # fmt: skip
FUNCTIONS = [
    *(
        Case(new(Function, functional.l2_attention), (heads,), given, says=f"l2_attention {i}")
        for i, given in enumerate(
            [
                {},
                {"is_causal": True, "slopes": slopes, "scale": temperature},
                {"is_causal": True, "window": 2, "key_padding_mask": padding},
                {"bias": bias, "scale": 0.5},
            ]
        )
    ),
    *(
        Case(new(Function, functional.l2_attention_weights), (heads,), given, says=f"l2_attention_weights {i}")
        for i, given in enumerate([{}, {"is_causal": True, "slopes": slopes}, {"bias": bias}])
    ),
    Case(
        new(Function, functional.l2_attention_step), (heads,), {"queries": 2, "slopes": slopes},
        says="l2_attention_step",
    ),
    *(
        Case(new(Function, functional.spectral_norm_bound), (tokens,), {"method": m}, says="spectral_norm_bound",
             trains=m != "svd")
        for m in ("cholesky", "gram", "svd")
    ),
    Case(new(Function, functional.l2_gain), (lambda: 6,), {"bias": bias}, says="l2_gain", trains=False),
]  # fmt: skip
ANALYSIS = by_name(
    [
        *(
            Case(ATTENTION, (tokens, weights) if call.__code__.co_argcount == 3 else (tokens,), {}, call,
                 says=name, trains=False)
            for name, call in CALLS.items()
        ),
        *OTHERS,
        *FUNCTIONS,
    ]
)  # fmt: skip
