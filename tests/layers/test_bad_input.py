"""Bad input to layers gets an error that names what was given and the rule it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lipformer as lf
from lipformer.functional import debug_checks

D, H, N = 8, 2, 5
X = torch.randn(3, N, D, generator=torch.Generator().manual_seed(0))
LATER = torch.ones(N, N, dtype=torch.bool).triu(1)
ALIBI = {"positions": "alibi", "causal": True}


def attention(**options: Any) -> lf.L2MultiheadAttention:
    return lf.L2MultiheadAttention(**{"embed_dim": D, "num_heads": H, "batch_first": True, **options})


BUILDS: list[tuple[dict[str, Any], str]] = [
    ({"num_heads": 3}, "multiple of num_heads, got embed_dim=8, num_heads=3"),
    ({"positions": "learned"}, "must be None, 'alibi' or 'rotary', got 'learned'"),
    ({"positions": "alibi"}, "positions='alibi' needs causal=True, got causal=None"),
    ({"slopes": (0.1, 0.2)}, "slopes need positions='alibi', got positions=None"),
    ({**ALIBI, "slopes": (0.5,)}, r"slopes must be 2 positive numbers, got \(0.5,\)"),
    ({**ALIBI, "slopes": (0.5, -1.0)}, r"slopes must be 2 positive numbers, got \(0.5, -1.0\)"),
    ({"window": 3}, "window=3 needs causal=True, got causal=None"),
    ({"window": 3, "causal": False}, "needs causal=True, got causal=False"),
    ({"window": 0, "causal": True}, "window must be None, or at least 1 .* got window=0"),
    ({"max_len": 0}, "max_len must be None or an integer >= 1, got 0"),
    ({"causal": 1}, "causal must be True, False or None, got 1"),
    ({"embed_dim": 6, "positions": "rotary"}, "needs an even head width, got 3"),
]


@pytest.mark.parametrize(("options", "message"), BUILDS)
def test_building(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(**options)


ANY: dict[str, Any] = {"any_mask": True}
HIDDEN = torch.zeros(N, N).index_put((torch.tensor(3), torch.tensor(3)), torch.tensor(-torch.inf))
CALLS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"key": X.clone()}, "query and key must be one and the same tensor"),
    ({}, {"value": X[:, :2]}, r"query and value must be one .* shapes \(3, 5, 8\) and \(3, 2, 8\)"),
    (ANY, {"attn_mask": torch.eye(N) > 0}, "hides token 0's own key: every token must be allowed to"),
    (ANY, {"attn_mask": HIDDEN}, "hides token 3's own key"),
    (ANY, {"attn_mask": -torch.eye(N)}, "no entry of attn_mask may exceed the diagonal"),
    (
        {},
        {"attn_mask": LATER.triu(2)},
        r"neither empty nor the causal mask .* \(causal=None, any_mask=F",
    ),
    ({"causal": False}, {"attn_mask": LATER}, "causal=False, any_mask=False"),
    (
        {"causal": False},
        {"is_causal": True},
        "is_causal=True, but the layer was built with causal=False",
    ),
    *(
        (
            {},
            {"attn_mask": torch.zeros(N, N + 1), **hint},
            r"shape \(5, 5\) or \(6, 5, 5\), got \(5, 6\)",
        )
        for hint in ({}, {"is_causal": True})
    ),
    ({}, {"key_padding_mask": torch.zeros(3, 6) > 0}, r"of shape .* \(3, 5\), got torch.bool \(3, 6\)"),
    ({}, {"key_padding_mask": torch.full((3, N), -0.5)}, "may hold only 0 and -inf, got -0.5"),
    ({}, {"query": X[..., :6]}, r"\(B, N, D\) or \(N, D\) with D=8, got \(3, 5, 6\)"),
    ({"max_len": 4}, {}, "max_len is 4, got 5 tokens"),
]


@pytest.mark.parametrize(("options", "call", "message"), CALLS)
def test_calling(options: dict[str, Any], call: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(**options)(**{"query": X, **call})


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_input_under_the_debug_flag(value: float) -> None:
    layer, bad = attention(), X.clone()
    bad[1, 2, 3] = value
    layer(bad)
    with debug_checks(), pytest.raises(ValueError, match="query must be finite .* 1 non-finite of 120"):
        layer(bad)
    layer(bad)  # the flag is down again


OTHERS: dict[str, Callable[[], object]] = {
    "dim must be at least 2, got 1": lambda: lf.CenterNorm(1),
    "radius must be positive and finite, got 0": lambda: lf.BallProjection(0),
    r"even number of features, got shape \(3, 5, 7\)": lambda: lf.MaxMin()(X[..., :7]),
    r"weight must be in \[0, 1\], got 1.5": lambda: lf.ConvexResidual(nn.Identity(), 1.5),
    "coeff must be positive and finite, got -0.9": lambda: lf.Contractive(attention(), -0.9),
    "number of tokens, and none was given": lambda: lf.Contractive(attention()),
    "needs a causal layer": lambda: lf.Contractive(attention(), norm="self", seq_len=N),
    "dot-product attention": lambda: lf.Contractive(nn.Sequential(nn.MultiheadAttention(D, H))),
}


@pytest.mark.parametrize("message", OTHERS)
def test_other_layers(message: str) -> None:
    with pytest.raises((ValueError, lf.NotCertifiable), match=message):
        OTHERS[message]()
