"""Bad input to layers gets an error that names what was given and the rule it breaks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import lipformer as lf
from lipformer.functional import debug_checks

D, H, N = 8, 2, 5
X = torch.randn(3, N, D, generator=torch.Generator().manual_seed(0))
OWN = torch.eye(N, dtype=torch.bool)

BUILDS: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"embed_dim": 8, "num_heads": 3}, "multiple of num_heads, got embed_dim=8, num_heads=3"),
    "no heads": ({"num_heads": 0}, "embed_dim must be a positive multiple .* num_heads=0"),
    "dropout": ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    "positions": ({"positions": "learned"}, "must be None, 'alibi' or 'rotary', got 'learned'"),
    "alibi": ({"positions": "alibi"}, "positions='alibi' needs causal=True, got causal=None"),
    "slopes": ({"slopes": (0.1, 0.2)}, "slopes need positions='alibi', got positions=None"),
    "slope count": (
        {"positions": "alibi", "causal": True, "slopes": (0.5,)},
        r"slopes must be 2 positive numbers, got \(0.5,\)",
    ),
    "slope sign": (
        {"positions": "alibi", "causal": True, "slopes": (0.5, -1.0)},
        r"slopes must be 2 positive numbers, got \(0.5, -1.0\)",
    ),
    "window": ({"window": 3}, "window=3 needs causal=True, got causal=None"),
    "window unmasked": ({"window": 3, "causal": False}, "needs causal=True, got causal=False"),
    "empty window": ({"window": 0, "causal": True}, "window must be None or an integer >= 1, got 0"),
    "max_len": ({"max_len": 0}, "max_len must be None or an integer >= 1, got 0"),
    "truth value": ({"causal": 1}, "causal must be True, False or None, got 1"),
    "odd rotary": ({"embed_dim": 6, "positions": "rotary"}, "needs an even head width, got 3"),
    "proj_coeff": ({"proj_coeff": -1.0}, "coeff must be positive and finite, got -1.0"),
}


@pytest.mark.parametrize("name", BUILDS)
def test_building(name: str) -> None:
    options, message = BUILDS[name]
    with pytest.raises(ValueError, match=message):
        lf.L2MultiheadAttention(**{"embed_dim": D, "num_heads": H, **options})


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "key": ({}, {"key": X.clone()}, ValueError, "query and key must be one and the same tensor"),
    "value": (
        {},
        {"value": X[:, :2]},
        ValueError,
        r"query and value must be one .* shapes \(3, 5, 8\) and \(3, 2, 8\)",
    ),
    "own key": (
        {"any_mask": True},
        {"attn_mask": OWN},
        ValueError,
        "hides token 0's own key: every token must be allowed to attend to itself",
    ),
    "own key added": (
        {"any_mask": True},
        {
            "attn_mask": torch.zeros(N, N).index_put(
                (torch.tensor(3), torch.tensor(3)), torch.tensor(-torch.inf)
            )
        },
        ValueError,
        "hides token 3's own key",
    ),
    "raised": (
        {"any_mask": True},
        {"attn_mask": torch.eye(N) * -1},
        ValueError,
        "no entry of attn_mask may exceed the diagonal",
    ),
    "other mask": (
        {},
        {"attn_mask": torch.ones(N, N, dtype=torch.bool).triu(2)},
        ValueError,
        r"neither empty nor the causal mask .* \(causal=None, any_mask=False\)",
    ),
    "causal mask": (
        {"causal": False},
        {"attn_mask": torch.ones(N, N, dtype=torch.bool).triu(1)},
        ValueError,
        "causal=False, any_mask=False",
    ),
    "causal flag": (
        {"causal": False},
        {"is_causal": True},
        ValueError,
        "is_causal=True, but the layer was built with causal=False",
    ),
    "mask shape": (
        {},
        {"attn_mask": torch.zeros(N, N + 1)},
        ValueError,
        r"attn_mask must have shape \(5, 5\) or \(6, 5, 5\), got \(5, 6\)",
    ),
    "mask shape with a hint": (
        {},
        {"attn_mask": torch.zeros(N, N + 1), "is_causal": True},
        ValueError,
        r"attn_mask must have shape \(5, 5\) or \(6, 5, 5\), got \(5, 6\)",
    ),
    "mask dtype": (
        {"any_mask": True},
        {"attn_mask": torch.zeros(N, N, dtype=torch.int64)},
        TypeError,
        "attn_mask must be bool or floating-point, got torch.int64",
    ),
    "padding shape": (
        {},
        {"key_padding_mask": torch.zeros(3, N + 1, dtype=torch.bool)},
        ValueError,
        r"key_padding_mask must have shape .* \(3, 5\), got \(3, 6\)",
    ),
    "padding dtype": (
        {},
        {"key_padding_mask": torch.zeros(3, N, dtype=torch.int32)},
        TypeError,
        r"key_padding_mask must be bool .* or float .*, got torch.int32",
    ),
    "padding value": (
        {},
        {"key_padding_mask": torch.full((3, N), -0.5)},
        ValueError,
        "may hold only 0 and -inf, got -0.5",
    ),
    "width": ({}, {"query": X[..., :6]}, ValueError, r"with D=8, got \(3, 5, 6\)"),
    "rank one": ({}, {"query": X[0, 0]}, ValueError, r"at least 2 dimensions, got shape \(8,\)"),
    "rank four": ({}, {"query": X[None]}, ValueError, r"\(B, N, D\) or \(N, D\) .* got \(1, 3, 5, 8\)"),
    "no tokens": ({}, {"query": X[:, :0]}, ValueError, r"at least one token .* got \(3, 0, 8\)"),
    "integers": ({}, {"query": X.long()}, TypeError, "floating-point dtype, got torch.int64"),
    "a list": ({}, {"query": [1.0]}, TypeError, "query must be a torch.Tensor, got list"),
    "too long": ({"max_len": 4}, {}, ValueError, "max_len is 4, got 5 tokens"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calling(name: str) -> None:
    options, call, kind, message = CALLS[name]
    layer = lf.L2MultiheadAttention(D, H, batch_first=True, **options)
    with pytest.raises(kind, match=message):
        layer(**{"query": X, **call})


def test_the_layout_is_named() -> None:
    with pytest.raises(ValueError, match=re.escape("(N, B, D) or (N, D) with D=8")):
        lf.L2MultiheadAttention(D, H)(X[..., :6])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_input_under_the_debug_flag(value: float) -> None:
    layer = lf.L2MultiheadAttention(D, H, batch_first=True)
    bad = X.clone()
    bad[1, 2, 3] = value
    layer(bad)
    with debug_checks(), pytest.raises(ValueError, match="query must be finite .* 1 non-finite of 120"):
        layer(bad)
    layer(bad)  # the flag is down again


def test_other_layers() -> None:
    with pytest.raises(ValueError, match="dim must be at least 2, got 1"):
        lf.CenterNorm(1)
    with pytest.raises(ValueError, match=r"last dimension must be 4, got shape \(3, 5, 8\)"):
        lf.CenterNorm(4)(X)
    with pytest.raises(ValueError, match="radius must be positive and finite, got 0"):
        lf.BallProjection(0)
    with pytest.raises(ValueError, match=r"even number of features, got shape \(3, 5, 7\)"):
        lf.MaxMin()(X[..., :7])
    with pytest.raises(ValueError, match=r"weight must be in \[0, 1\], got 1.5"):
        lf.ConvexResidual(nn.Identity(), 1.5)


def test_contractive() -> None:
    attention = lf.L2MultiheadAttention(D, H, batch_first=True)
    with pytest.raises(ValueError, match="coeff must be positive and finite, got -0.9"):
        lf.Contractive(attention, -0.9)
    with pytest.raises(ValueError, match="norm must be one of l2, token, self, linf, got 'l1'"):
        lf.Contractive(attention, norm="l1")
    with pytest.raises(ValueError, match="seq_len must be None or an integer >= 1, got 2.5"):
        lf.Contractive(attention, seq_len=2.5)
    with pytest.raises(lf.NotCertifiable, match="grows with the number of tokens, and none was given"):
        lf.Contractive(attention)
    with pytest.raises(lf.NotCertifiable, match="needs a causal layer"):
        lf.Contractive(attention, norm="self", seq_len=N)
    with pytest.raises(lf.NotCertifiable, match="dot-product attention"):
        lf.Contractive(nn.Sequential(nn.MultiheadAttention(D, H)))
