"""The battery for NullKeyAttention, and what is particular to it."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.layers import NullKeyAttention
from tests.layers.battery import CertifiedLayer, slow_compile


class TestNullKey(CertifiedLayer):
    norms = ("l2", "token")
    attacked = (("l2", "plain"), ("token", "plain"), ("l2", "hidden"))
    variants = ("plain", "padded", "causal", "hidden", "lowered")
    options: ClassVar[dict[str, Any]] = {}

    def make(self) -> nn.Module:
        return NullKeyAttention(8, 2, batch_first=True, **self.options)

    def call(self, module: nn.Module, x: Tensor, variant: str = "plain") -> Tensor:
        n = x.shape[1]
        masks: dict[str, Any] = {"is_causal": variant == "causal"}
        if variant == "padded":
            masks["key_padding_mask"] = torch.arange(n).eq(1).expand(x.shape[:2])
        if variant == "hidden":  # also own keys, and all keys of the first token
            masks["attn_mask"] = torch.rand(n, n, generator=torch.Generator().manual_seed(3)) < 0.5
            masks["attn_mask"][0] = True
        if variant == "lowered":
            masks["attn_mask"] = -torch.rand(n, n, generator=torch.Generator().manual_seed(3)).to(
                x.dtype
            )
        return module(x, **masks)[0]


class TestNullKeyCausal(TestNullKey):
    norms = ("l2", "token", "self")
    attacked = (("l2", "plain"),)
    variants = ("plain", "padded")
    options: ClassVar[dict[str, Any]] = {"causal": True, "bias": False, "max_len": 5}
    test_compile = slow_compile


@torch.no_grad()
def test_steps_give_the_full_pass() -> None:
    layer = NullKeyAttention(8, 2, batch_first=True, causal=True, max_len=7)
    x = torch.randn(2, 7, 8)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, :2] = True
    for padded in (None, padding):
        cache, found = None, []
        for part in (slice(0, 3), slice(3, 4), slice(4, 7)):
            rows = None if padded is None else padded[:, part]
            out, cache = layer.step(x[:, part], cache, rows)
            found.append(out)
        torch.testing.assert_close(torch.cat(found, 1), layer(x, key_padding_mask=padded)[0])
    with pytest.raises(ValueError, match="max_len is 7, got 8 tokens"):
        layer.step(x[:, :1], cache)


def test_what_it_cannot_do_is_refused() -> None:
    layer, x = NullKeyAttention(8, 2, dropout=0.1, batch_first=True), torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match="one and the same tensor"):
        layer(x, x.clone())
    with pytest.raises(ValueError, match="gives no weights"):
        layer(x, need_weights=True)
    with pytest.raises(lf.NotCertifiable, match="dropout of 0.1 is random"):
        lf.certify(layer, seq_len=5)
    layer.eval()
    for options, reason in (
        ({}, "grows with the number of tokens"),
        ({"seq_len": 5, "norm": "linf"}, "norms of whole tokens"),
        ({"seq_len": 5, "norm": "self"}, "needs a causal layer"),
    ):
        with pytest.raises(lf.NotCertifiable, match=reason):
            lf.certify(layer, **options)
    with torch.no_grad():
        layer.log_value_scale.fill_(-200.0)
    with pytest.raises(lf.NotCertifiable, match="leave the range"):
        lf.certify(layer, seq_len=5)
    with pytest.raises(TypeError, match="attn_mask must be a tensor or None, got list"):
        layer(x, attn_mask=[0.0])  # type: ignore[arg-type]
    layer.v_proj = nn.Sequential(layer.v_proj)  # type: ignore[assignment]
    with pytest.raises(TypeError, match="v_proj is Sequential, whose forward is not that of nn.Linear"):
        layer(x)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_heads": 3}, "positive multiple of num_heads"),
        ({"embed_dim": 8.0}, "embed_dim must be an integer, got 8.0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"max_len": 0}, "max_len must be None or an integer >= 1, got 0"),
        ({"max_len": True}, "max_len must be None or an integer >= 1, got True"),
        ({"causal": "no"}, "causal must be True or False, got 'no'"),
        ({"batch_first": 1}, "batch_first must be True or False, got 1"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        NullKeyAttention(**{"embed_dim": 8, "num_heads": 2, **options})


def test_later_keys_stay_hidden_beside_a_mask() -> None:
    layer, x = NullKeyAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    hidden = torch.zeros(5, 5, dtype=torch.bool)
    hidden[:, 0] = True
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = layer(x, attn_mask=hidden | later)[0]
    torch.testing.assert_close(layer(x, attn_mask=hidden, is_causal=True)[0], expected)
    assert not torch.allclose(layer(x, attn_mask=hidden)[0], expected)


def test_a_bias_of_the_keys_counts() -> None:
    """None is made, but a projection may be exchanged for one that has it."""
    layer, x = NullKeyAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    layer.k_proj = nn.Linear(8, 8)
    found = layer(x)[0]
    with torch.no_grad():
        layer.q_proj.bias.sub_(layer.k_proj.bias)
        layer.k_proj.bias.zero_()
    torch.testing.assert_close(layer(x)[0], found)


@pytest.mark.parametrize("norm", ["l2", "token"])
def test_tiny_weights_have_no_bound_of_zero(norm: str) -> None:
    layer = NullKeyAttention(8, 2, dtype=torch.float64)
    with torch.no_grad():
        for name in layer.projections:
            layer.get_parameter(f"{name}.weight").mul_(1e-170)
    assert lf.certify(layer, seq_len=5, norm=norm).bound > 0.0


def test_it_can_be_divided_and_inverted() -> None:
    layer = NullKeyAttention(8, 2, batch_first=True, max_len=5).double()
    block = lf.InvertibleResidual(layer, 0.9, seq_len=5)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    assert (block.inverse(block(x), tol=1e-12) - x).abs().max() < 1e-10
    # Divided by the smaller of its bounds in the two norms.
    bounds = [lf.certify(block, seq_len=5, norm=norm).bound for norm in ("l2", "token")]
    assert min(bounds) <= 1.9 + 1e-9
