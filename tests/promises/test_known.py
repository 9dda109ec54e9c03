"""What was once certified wrongly, as small trees: each is refused, or its bound holds."""

from __future__ import annotations

import pytest

from tests.promises.checks import examine
from tests.promises.trees import Case


def attention(dim: int = 1, **options: object) -> tuple:
    return (
        "attention",
        {"dim": dim, "heads": 1, "batch_first": True, "causal": False, "eye": True} | options,
        [],
    )


def linear(scale: float, **options: object) -> tuple:
    return ("linear", {"in": 4, "out": 4, "bias": False, "scale": scale} | options, [])


def odd(node: tuple, name: str, value: object = None, early: bool = False) -> tuple:
    return (node[0], {**node[1], "defect": (name, value, early)}, node[2])


def seq(*parts: tuple) -> tuple:
    return ("seq", {}, [*parts])


RESHAPED = seq(("flatten", {}, []), ("unflatten", {"shape": [8, 1]}, []))
CONV = (
    "conv",
    {"dims": 1, "in": 2, "out": 2, "kernel": 3, "stride": 2, "ones": True, "params": ["normalize"]},
    [],
)
ENCODER_LAYER = (
    "encoder_layer",
    {"dim": 4, "activation": "relu", "batch_first": True, "norm_first": True, "eps": 1.0, "scale": 3.0},
    [attention(4)],
)
TORCH_ATTENTION = ("torch_attention", {"dim": 4, "heads": 2, "batch_first": True, "bias": True}, [])
LARGE = seq(*[("spectral_linear", {"in": 4, "out": 4, "coeff": 2050.0, "mode": "normalize"}, [])] * 2)
CASES = {
    "tokens change in a nested container": (seq(RESHAPED, attention()), {"shape": (1, 8), "seq_len": 1}),
    "tokens change in a nested container, contractive": (
        ("contractive", {"coeff": 0.9, "seq_len": 1}, [seq(RESHAPED, attention())]),
        {"shape": (1, 8), "seq_len": 1},
    ),
    "a radius of bfloat16 weights": (
        ("spectral_linear", {"in": 4, "out": 4, "coeff": 1.0, "mode": "normalize"}, []),
        {"dtype": "bfloat16", "asks": ("radius",)},
    ),
    "a subnormal factor in float16": (
        ("contractive", {"coeff": 0.9, "norm": "l2"}, [LARGE]), {"dtype": "float16"},
    ),
    "a subnormal factor under autocast": (
        LARGE, {"dtype": "float32", "autocast": "float16", "asks": ("invertible",)},
    ),
    "subnormal weights in float16": (
        ("spectral_linear", {"in": 4, "out": 4, "coeff": 1e-6, "mode": "normalize"}, []),
        {"dtype": "float16"},
    ),
    "samples that mix in a perturbation": (attention(4, batch_first=False), {"asks": ("perturbation",)}),
    "samples that mix in a radius": (attention(4, batch_first=False), {"asks": ("radius",)}),
    "torch's attention with a forward of its own": (odd(TORCH_ATTENTION, "override", "forward"), {}),
    "torch's attention with a hook": (odd(TORCH_ATTENTION, "hook"), {}),
    "an overridden _conv_forward": (odd(CONV, "override", "_conv_forward"), {"shape": (2, 4)}),
    "an overridden _ff_block": (
        odd(ENCODER_LAYER, "override", "_ff_block"), {"shape": (1, 4), "seq_len": 1},
    ),
    "an overridden _sa_block": (
        odd(ENCODER_LAYER, "override", "_sa_block"), {"shape": (1, 4), "seq_len": 1},
    ),
    "a global hook": (odd(linear(1.0), "global_hook"), {}),
    "weights that underflow": (seq(*map(linear, (1e-200, 1e-200, 1e200, 1e200))), {}),
    "weights that underflow in float32": (
        seq(*map(linear, [1e-38] * 9 + [1e38] * 9)), {"dtype": "float32"},
    ),
    "another weight of ConvexResidual": (
        odd(("convex", {"weight": 0.5}, [linear(-1.0, seed=3)]), "set_weight", 1.6), {},
    ),
    "another weight of ConvexResidual, perturbed": (
        odd(("convex", {"weight": 0.5}, [linear(-1.0, seed=3)]), "set_weight", 1.6),
        {"asks": ("perturbation",)},
    ),
    "causal=1": (odd(attention(max_len=8), "set_causal", 1), {"shape": (8, 1), "seq_len": 8}),
    "a stride after spectral_bound": (
        odd(CONV, "set_stride", [1]), {"shape": (2, 6), "asks": ("spectral",)},
    ),
    "max_len=None in a block for fewer tokens": (
        ("invertible", {"coeff": 0.9, "seq_len": 2, "norm": "l2"},
         [odd(attention(), "set_max_len", None)]),
        {"shape": (8, 1), "seq_len": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_was_wrong_is_refused_or_holds(name: str) -> None:
    tree, options = CASES[name]
    options = {"shape": (3, 4), **options}
    asks = options.pop("asks", None)
    outcome = examine(Case(tree, **options), asks)
    assert outcome.failure is None, str(outcome.failure)
