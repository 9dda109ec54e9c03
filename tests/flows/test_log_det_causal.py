"""The token-by-token log-determinant of causal branches: exact, in closed form for attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.flows import residual_log_det, supports_causal
from lipformer.layers.attention import own_token as _own_attention
from lipformer.layers.attention.own_token import own_rows
from tests.flows.log_det_oracles import (
    attention,
    gradients,
    log_det,
    log_det_oracle,
    smooth_feed_forward,
    some_padding,
)
from tests.oracles import dense_jacobian, l2_attention_oracle

pytestmark = pytest.mark.usefixtures("float64")


FORMS: dict[str, dict[str, Any]] = {
    "paper": {},
    "lean": {"value_proj": False},
    "paper rotary": {"positions": "rotary"},
    "lean rotary": {"value_proj": False, "positions": "rotary"},
    "alibi": {"value_proj": False, "positions": "alibi"},
    "window": {"window": 3},
    "alibi window": {"positions": "alibi", "window": 2},
    "normalised": {"proj_coeff": 1.0},
}


def value(branch: nn.Module, x: Tensor, padding: Tensor | None = None, method: str = "causal") -> Tensor:
    return log_det(branch, x, method, key_padding_mask=padding).value


class TestAttention:
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("heads", [1, 2, 4])
    @pytest.mark.parametrize("form", list(FORMS))
    def test_equals_the_dense_one(self, form: str, heads: int, padded: bool) -> None:
        branch = lf.Contractive(
            attention(8, heads, causal=True, **FORMS[form]), 0.9, norm="self", seq_len=5
        )
        x = 2 * torch.randn(2, 5, 8)
        padding = some_padding(2, 5) if padded else None
        out, found = residual_log_det(branch, x, method="causal", rate=0.9, key_padding_mask=padding)
        torch.testing.assert_close(found.value, log_det_oracle(branch, x, padding), rtol=0, atol=1e-9)
        assert found.value.abs().min() > 1e-3
        expected = branch(x, key_padding_mask=padding)
        if padding is not None:
            expected = expected.masked_fill(padding.unsqueeze(-1), 0.0)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("form", list(FORMS))
    def test_gradients_equal_those_of_the_dense_one(self, form: str) -> None:
        branch = lf.Contractive(attention(4, 2, causal=True, **FORMS[form]), 0.9, norm="self", seq_len=5)
        x = torch.randn(3, 5, 4, requires_grad=True)
        inputs = (x, *branch.parameters())
        padding = some_padding(3, 5)
        dense = gradients(value(branch, x, padding, method="exact"), *inputs)
        found = gradients(value(branch, x, padding), *inputs)
        torch.testing.assert_close(found, dense, rtol=1e-9, atol=1e-10)
        assert all(g.any() for g in dense[:2])

    def test_without_contraction(self) -> None:
        layer, x = attention(causal=True), torch.randn(2, 5, 4)
        torch.testing.assert_close(value(layer, x), log_det_oracle(layer, x), rtol=0, atol=1e-9)

    def test_own_blocks_are_those_of_the_jacobian(self) -> None:
        y = torch.randn(1, 2, 6, 3)
        slopes = torch.tensor([0.3, 0.1])
        padding = torch.tensor([[False, False, True, False, False, False]])
        rows = own_rows(y, window=4, slopes=slopes, padding=padding)
        jacobian = dense_jacobian(
            lambda t: l2_attention_oracle(
                t, is_causal=True, window=4, slopes=slopes, key_padding_mask=padding, scale=0.5
            ),
            y,
        ).reshape(2, 6, 3, 2, 6, 3)
        for h in range(2):
            for i in range(6):
                block = rows.weight[0, h, i] * torch.eye(3) + rows.covariance[0, h, i]
                torch.testing.assert_close(block, jacobian[h, i, :, h, i], rtol=0, atol=1e-12)

    @pytest.mark.parametrize("window", [None, 2])
    def test_chunks_do_not_matter(self, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        branch = lf.Contractive(attention(causal=True, window=window), 0.9, norm="self", seq_len=7)
        x = torch.randn(3, 7, 4, requires_grad=True)
        inputs, padding = (x, *branch.parameters()), some_padding(3, 7)
        whole = value(branch, x, padding)
        expected = gradients(whole, *inputs)
        monkeypatch.setattr(_own_attention, "_BUDGET", 3 * 2 * 7 * 2 * 3)
        parts = value(branch, x, padding)
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-13)
        torch.testing.assert_close(gradients(parts, *inputs), expected, rtol=0, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(value(branch, x, padding), whole, rtol=0, atol=1e-13)

    @pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
    @pytest.mark.parametrize("offset", [0.0, 1e3])
    def test_float32_is_accurate_at_every_scale(self, scale: float, offset: float) -> None:
        branch = lf.Contractive(
            attention(8, 2, causal=True, value_proj=False), 0.9, norm="self", seq_len=32
        )
        # Clusters: the covariances come from close tokens that may lie far from the others.
        centres = scale * torch.randn(1, 4, 8)
        x = (centres.repeat(1, 8, 1) + 0.5 * torch.randn(2, 32, 8) + offset).float().double()
        expected = value(branch, x)
        found = value(branch.float(), x.float())
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-3 if offset else 5e-4)


def sequences() -> dict[str, nn.Module]:
    attend = attention(6, 3, causal=True)
    return {
        "attention": attention(causal=True),
        "feed-forward": smooth_feed_forward(),
        "MaxMin": lf.FeedForward(4, 8),
        "in, attention, out": nn.Sequential(nn.Linear(4, 6), attend, nn.Linear(6, 4)),
        "spectral": nn.Sequential(lf.SpectralLinear(4, 6), attend, lf.SpectralLinear(6, 4)),
        "residuals": nn.Sequential(
            lf.Residual(attention(causal=True, value_proj=False)),
            lf.ConvexResidual(smooth_feed_forward(), 0.3),
        ),
        "contractive inside": nn.Sequential(
            lf.Contractive(attention(causal=True), 0.7, norm="self", seq_len=6), nn.Tanh()
        ),
        "token norms": nn.Sequential(lf.CenterNorm(4, True), lf.BallProjection(1.0), nn.GELU()),
        "torch norms": nn.Sequential(nn.LayerNorm(4, eps=1.0), nn.RMSNorm(4, eps=1.0)),
        "softmax": nn.Sequential(nn.Softmax(-1), nn.Identity(), nn.Dropout(0.5).eval(), nn.PReLU()),
        "twice the same": nn.Sequential(*[smooth_feed_forward()] * 2),
    }


class TestComposition:
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("tokens", [1, 5])
    @pytest.mark.parametrize("name", list(sequences()))
    def test_value_and_gradients_equal_the_dense_ones(
        self, name: str, tokens: int, padded: bool
    ) -> None:
        branch = lf.Contractive(sequences()[name], 0.9, norm="self", seq_len=6)
        assert supports_causal(branch)
        with torch.no_grad():  # away from orthogonal weights, where a spectral norm has a kink
            for parameter in branch.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        x = torch.randn(2, tokens, 4, requires_grad=True)
        padding = some_padding(2, tokens) if padded and tokens > 1 else None
        found = value(branch, x, padding)
        torch.testing.assert_close(found, log_det_oracle(branch, x, padding), rtol=0, atol=1e-9)
        inputs = (x, *branch.parameters())
        dense = gradients(value(branch, x, padding, method="exact"), *inputs)
        torch.testing.assert_close(gradients(found, *inputs), dense, rtol=1e-8, atol=1e-10)

    @pytest.mark.parametrize("name", list(sequences()))
    def test_baked(self, name: str) -> None:
        branch = lf.Contractive(sequences()[name], 0.9, norm="self", seq_len=6)
        x = torch.randn(2, 5, 4)
        torch.testing.assert_close(value(lf.bake(branch), x), value(branch, x), rtol=0, atol=1e-9)


class Cumulative(nn.Module):
    """A causal module of a user: the mean of the tokens so far."""

    causal = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = lf.SpectralLinear(4, 4, coeff=0.7)

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)
        return self.linear(torch.tanh(x.cumsum(1) / count[:, None]))


class Liar(Cumulative):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(1))


class TokenWise(nn.Module):
    token_wise = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = lf.SpectralLinear(4, 4, coeff=0.7)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(x))


class TestOwnModules:
    @pytest.mark.parametrize("make", [Cumulative, TokenWise])
    def test_a_module_that_says_so(self, make: type[nn.Module]) -> None:
        branch = nn.Sequential(make(), smooth_feed_forward())
        x = torch.randn(3, 5, 4, requires_grad=True)
        found = value(branch, x)
        torch.testing.assert_close(found, log_det_oracle(branch, x), rtol=0, atol=1e-9)
        inputs = (x, *branch.parameters())
        dense = gradients(value(branch, x, method="exact"), *inputs)
        torch.testing.assert_close(gradients(found, *inputs), dense, rtol=1e-8, atol=1e-10)

    def test_what_it_says_is_checked(self) -> None:
        with pytest.raises(ValueError, match="Liar says causal=True, but a later token"):
            value(Liar(), torch.randn(2, 4, 4))

    def test_others_are_refused_by_name(self) -> None:
        class Mystery(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return 0.1 * x

        branch = nn.Sequential(nn.Linear(4, 4), lf.Residual(Mystery()))
        assert not supports_causal(branch)
        with pytest.raises(ValueError, match=r"branch\.1\.branch \(Mystery.*'series', 'roulette' or"):
            value(branch, torch.randn(2, 4, 4))


class Reversed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(1))


@pytest.mark.parametrize(
    ("module", "known"),
    [
        (lf.L2MultiheadAttention(4, 2, causal=True), True),
        (lf.L2MultiheadAttention(4, 2, causal=False), False),
        (lf.L2MultiheadAttention(4, 2), False),
        (lf.FeedForward(4, 8), True),
        (lf.SpectralLinear(4, 4), True),
        (nn.LayerNorm(4), True),
        (nn.LayerNorm((3, 4)), False),
        (nn.Softmax(-1), True),
        (nn.Softmax(1), False),
        (nn.Flatten(), False),
        (nn.Sequential(nn.Linear(4, 4), nn.Flatten()), False),
        (nn.MultiheadAttention(4, 2), False),
        (nn.TransformerEncoderLayer(4, 2), False),
        (Reversed(4, 4), False),
    ],
)
def test_supports_causal(module: nn.Module, known: bool) -> None:
    assert supports_causal(module) is known
