"""Bad input to layers gets an error that names what was given and the rule it breaks."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

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


LATER_SETTINGS: list[tuple[dict[str, Any], str, Any, str]] = [
    ({}, "causal", 1, "causal must be True, False or None, got 1"),
    ({"causal": True, "window": 3}, "causal", False, "window=3 needs causal=True, got causal=False"),
    ({}, "window", 3, "window=3 needs causal=True, got causal=None"),
    ({}, "max_len", 2.5, "max_len must be None or an integer >= 1, got 2.5"),
    ({}, "dropout", 1.5, r"dropout must be in \[0, 1\), got 1.5"),
    ({}, "batch_first", 1, "batch_first must be True or False, got 1"),
    ({}, "any_mask", None, "any_mask must be True or False, got None"),
    ({"causal": True}, "positions", "alibi", "positions='alibi' and its slopes are given to the constr"),
    (ALIBI, "positions", None, "slopes need positions='alibi', got positions=None"),
    (ALIBI, "slopes", None, "positions='alibi' and its slopes .* slopes=None"),
    (ALIBI, "slopes", (1.0, -1.0), r"slopes must be 2 positive numbers, got \(1.0, -1.0\)"),
    ({}, "num_heads", 4, "num_heads is 2 by the shape of the weights, got 4"),
]


@pytest.mark.parametrize(("options", "name", "value", "message"), LATER_SETTINGS)
def test_settings_changed_later_are_checked(
    options: dict[str, Any], name: str, value: Any, message: str
) -> None:
    layer = attention(**options)
    with pytest.raises(ValueError, match=message):
        setattr(layer, name, value)
    assert lf.certify(layer, seq_len=N).bound == lf.certify(copy.deepcopy(layer), seq_len=N).bound


def test_settings_changed_later_are_seen() -> None:
    layer = attention(causal=False)
    before = lf.certify(layer, seq_len=64).bound
    layer.causal = True
    assert lf.certify(layer, seq_len=64).bound != before
    slopes = attention(**ALIBI)
    slopes.slopes = [0.1, 2.0]
    assert slopes.slopes == (struct.unpack("f", struct.pack("f", 0.1))[0], 2.0)
    divided = lf.Contractive(nn.Linear(D, D))
    divided.coeff = 0.3
    assert lf.certify(divided).bound == 0.3
    shift = lf.TokenShift(D)
    bounded = lf.SpectralLinear(2, 2)
    bounded.coeff = 0.3
    assert lf.certify(bounded).bound == 0.3
    assert torch.linalg.matrix_norm(bounded.weight, 2) <= 0.3
    for module, name in ((divided, "norm"), (shift, "batch_first")):
        with pytest.raises(AttributeError, match=name):
            setattr(module, name, None)


@pytest.mark.parametrize("around", [lf.Contractive, lf.InvertibleResidual])
def test_attention_that_forgets_the_length_it_was_divided_for(around: Any) -> None:
    inner = attention()
    block = around(inner, seq_len=2)
    assert block(X[:, :2]).shape == (3, 2, D)
    inner.max_len = None
    with pytest.raises(
        lf.NotCertifiable, match=r"divided for seq_len=2, it takes longer inputs \(max_l"
    ):
        block(X)
    chain = lf.Contractive(nn.Sequential(nn.Linear(D, D), attention()), seq_len=2)
    chain.module[1] = attention()
    with pytest.raises(lf.NotCertifiable, match="takes longer inputs"):
        chain(X)


class Adapter(nn.Linear):
    """A linear layer with an addition of low rank, as adapters for fine-tuning have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.sum(-1, keepdim=True)


def _adapted(linear: nn.Linear) -> nn.Linear:
    return Adapter(D, D)


def _pruned(linear: nn.Linear) -> nn.Linear:
    return prune.l1_unstructured(linear, "weight", 5)


def _old_weight_norm(linear: nn.Linear) -> nn.Linear:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(linear)


def _replaced(linear: nn.Linear) -> nn.Linear:
    linear.forward = lambda x: x  # type: ignore[method-assign]
    return linear


@pytest.mark.parametrize("change", [_adapted, _pruned, _old_weight_norm, _replaced])
@pytest.mark.parametrize("name", ["q_proj", "v_proj", "out_proj"])
def test_projections_that_are_more_than_their_weights(name: str, change: Any) -> None:
    layer = attention(value_proj=True, max_len=N)
    divided = lf.Contractive(layer)
    setattr(layer, name, change(getattr(layer, name)))
    calls = [lambda: layer(X), lambda: divided(X), lambda: lf.bake(layer)]
    if change in (_pruned, _old_weight_norm):
        calls.pop()  # torch cannot copy such modules
    for call in calls:
        with pytest.raises((TypeError, lf.NotCertifiable), match=f"{name}.*torch('s)? parametrizations"):
            call()
    with pytest.raises(lf.NotCertifiable, match=f"{name}.*torch('s)? parametrizations"):
        lf.certify(layer)


def test_parametrized_projections_are_used() -> None:
    layer = attention(max_len=N)
    nn.utils.parametrizations.weight_norm(layer.out_proj)
    layer(X)[0].square().sum().backward()
    assert layer.out_proj.parametrizations.weight.original1.grad.abs().max() > 0
    assert lf.certify(layer).bound > 0
