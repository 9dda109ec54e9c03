"""TokenMean: its constant, padding, and the least number of tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer import analysis
from lipformer.layers import SubtractMean
from tests.layers.battery import WithoutParameters, slow_compile
from tests.oracles import dense_jacobian
from tests.promises.oracle import gain

PADDED = torch.tensor([[False, False, True, False, True]])


class TestTokenMean(WithoutParameters):
    norms = ("l2", "linf")
    variants = ("plain", "padded")
    attacked = (("l2", "padded"),)
    least = 0.44
    test_compile = slow_compile

    def make(self) -> nn.Module:
        return lf.TokenMean()

    def call(self, module: nn.Module, x: Tensor, variant: str = "plain") -> Tensor:
        return module(x) if variant == "plain" else module(x, PADDED.expand(len(x), -1))


class TestSubtractMean(TestTokenMean):
    norms = ("l2",)
    least = 0.99

    def make(self) -> nn.Module:
        return SubtractMean()


def test_the_mean_is_that_of_tokens_without_padding() -> None:
    x = torch.randn(1, 5, 8)
    out = SubtractMean()(x, PADDED)
    kept = ~PADDED[0]
    torch.testing.assert_close(out[:, kept], x[:, kept] - x[:, kept].mean(1, keepdim=True))
    assert not out[:, PADDED[0]].any()


@pytest.mark.parametrize("least", [1, 3, 4, 9])
@pytest.mark.parametrize("real", [0, 1, 3, 4])
def test_no_padding_exceeds_the_constant(real: int, least: int) -> None:
    layer = lf.TokenMean(least)
    mask = torch.arange(4)[None] >= real
    x = torch.randn(1, 4, 3, dtype=torch.float64)
    out = layer(x, mask)
    assert torch.allclose(out, x[:, :real].sum(1) / max(real, least))
    jacobian = dense_jacobian(lambda x: layer(x, mask), x)[None]
    for norm in ("l2", "token", "linf"):
        found = float(gain(jacobian, norm, 3, 3).max())
        bound = lf.certify(layer, norm=norm).bound
        assert found <= bound * (1 + 1e-12)
        if real == least:
            assert found >= bound * (1 - 1e-9)  # attained
    if real == 4:
        assert torch.allclose(layer(x), out)


def test_a_mean_over_fewer_tokens_exceeds_the_constant_of_more() -> None:
    """The control: without ``least`` in the divisor the gain of two tokens is above 1 / 4."""
    x = torch.ones(1, 2, 3)
    assert x.mean(1).norm() / x.norm() > lf.certify(lf.TokenMean(16)).bound
    assert lf.TokenMean(16)(x).norm() / x.norm() <= lf.certify(lf.TokenMean(16)).bound
    assert lf.certify(lf.TokenMean(16)).bound == pytest.approx(0.25, rel=1e-12)


def test_what_padding_holds_does_not_matter() -> None:
    x, layer = torch.randn(1, 5, 3), lf.TokenMean()
    other = x.masked_fill(PADDED[..., None], torch.nan)
    assert torch.equal(layer(x, PADDED), layer(other, PADDED))
    assert torch.equal(layer(x, torch.ones(1, 5, dtype=torch.bool)), torch.zeros(1, 3))


def test_many_tokens_of_half_precision_are_counted_exactly() -> None:
    """257 is 256 in bfloat16, which would be a mean of 1."""
    x = torch.zeros(1, 300, 2, dtype=torch.bfloat16)
    x[:, 0] = 256.0
    mask = torch.arange(300)[None] >= 257
    assert torch.equal(lf.TokenMean()(x, mask), torch.full((1, 2), 256 / 257).bfloat16())


def test_around_an_input() -> None:
    model = nn.Sequential(nn.Linear(3, 4), lf.TokenMean(4), nn.Linear(4, 2)).bfloat16()
    x = torch.randn(2, 4, 3).bfloat16()
    moved = analysis.perturbation_bound(model, x, 0.1)[1]
    assert bool((moved <= 0.1 * lf.certify(model).bound * (1 + 1e-9)).all())


def test_refusals() -> None:
    for least in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=f"least must be an integer >= 1, got {least}"):
            lf.TokenMean(least)
    with pytest.raises(ValueError, match=r"x must have shape \(B, N, D\), got \(4, 3\)"):
        lf.TokenMean()(torch.ones(4, 3))
    with pytest.raises(ValueError, match="key_padding_mask must be"):
        lf.TokenMean()(torch.ones(1, 4, 3), torch.ones(1, 5, dtype=torch.bool))
    with pytest.raises(lf.NotCertifiable, match="no bound in the self norm"):
        lf.certify(lf.TokenMean(), norm="self")
    time_first = lf.L2MultiheadAttention(4, 2, batch_first=False, max_len=4)
    with pytest.raises(lf.NotCertifiable, match="would mix samples"):
        lf.certify(nn.Sequential(lf.layers.scaled.FirstOutput(time_first), lf.TokenMean()))
