"""The dense log-determinant, and what all methods share: padding, dtypes, arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.flows import residual_log_det
from lipformer.flows.log_det import exact as _log_det_exact
from tests.flows.log_det_oracles import (
    attention,
    gradients,
    log_det_oracle,
    smooth_feed_forward,
    some_padding,
)


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)


def branches() -> dict[str, nn.Module]:
    return {
        "no mask": lf.Contractive(attention(value_proj=False), 0.9, seq_len=6),
        "rotary": lf.Contractive(attention(positions="rotary"), 0.9, seq_len=6),
        "causal": lf.Contractive(attention(causal=True), 0.9, seq_len=6),
        "feed-forward": lf.Contractive(smooth_feed_forward(), 0.9),
        "both": lf.Contractive(nn.Sequential(attention(), smooth_feed_forward()), 0.9, seq_len=6),
    }


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", list(branches()))
def test_equals_slogdet_of_the_autograd_jacobian(name: str, padded: bool) -> None:
    branch = branches()[name]
    x = 2 * torch.randn(3, 6, 4)
    padding = some_padding(3, 6) if padded else None
    out, log_det = residual_log_det(branch, x, method="exact", rate=0.9, key_padding_mask=padding)
    torch.testing.assert_close(log_det.value, log_det_oracle(branch, x, padding), rtol=0, atol=1e-9)
    expected = branch(x, key_padding_mask=padding)
    if padding is not None:
        expected = expected.masked_fill(padding.unsqueeze(-1), 0.0)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert log_det.value.abs().min() > 1e-3
    assert log_det.error_bound is not None
    assert not log_det.error_bound.any()
    assert log_det.terms == 0


def test_one_token() -> None:
    branch = lf.Contractive(attention(), 0.9, seq_len=1)
    x = torch.randn(2, 1, 4)
    value = residual_log_det(branch, x, method="exact", rate=0.9)[1].value
    torch.testing.assert_close(value, log_det_oracle(branch, x), rtol=0, atol=1e-9)


def test_the_gradient_is_that_of_the_log_determinant() -> None:
    branch = lf.Contractive(smooth_feed_forward(2, 4), 0.9)
    raw = branch.get_parameter("module.up.parametrizations.weight.original")

    def value(x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            raw.copy_(weight)
        found = residual_log_det(branch, x, method="exact", rate=0.9)[1].value
        # Through the module's own parameter, with the value of gradcheck's.
        (by_weight,) = torch.autograd.grad(found.sum(), raw, retain_graph=True)
        return found.sum() + ((weight - weight.detach()) * by_weight).sum()

    x = torch.randn(2, 3, 2, requires_grad=True)
    # Not the orthogonal start: there the spectral norm has a kink.
    weight = torch.randn_like(raw).requires_grad_()
    assert torch.autograd.gradcheck(value, (x, weight), atol=1e-6)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    branch, x = branches()["no mask"], torch.randn(2, 6, 4)
    whole = residual_log_det(branch, x, method="exact", rate=0.9)[1].value
    monkeypatch.setattr(_log_det_exact, "_BUDGET", 5 * 2 * 6 * 10)
    parts = residual_log_det(branch, x, method="exact", rate=0.9)[1].value
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-14)


def test_a_branch_that_does_not_depend_on_x() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones_like(x)

    for method in ("exact", "series", "roulette"):
        x = torch.randn(2, 3, 4)
        out, log_det = residual_log_det(Constant(), x, method=method, rate=0.5)
        assert not log_det.value.any()
        assert bool((out == 1).all())


METHODS = ("exact", "causal", "series", "roulette")


@pytest.mark.parametrize("method", METHODS)
class TestEveryMethod:
    def branch(self) -> lf.Contractive:
        parts = nn.Sequential(attention(causal=True), smooth_feed_forward())
        return lf.Contractive(parts, 0.5, seq_len=6)

    def test_padded_tokens_change_nothing_whatever_they_hold(self, method: str) -> None:
        branch, padding = self.branch(), torch.zeros(3, 6, dtype=torch.bool)
        padding[:, 4:] = True
        x = torch.randn(3, 6, 4)
        poisoned = x.masked_fill(padding.unsqueeze(-1), torch.nan).requires_grad_()
        found = []
        for tokens, mask in ((x[:, :4].clone().requires_grad_(), None), (poisoned, padding)):
            generator = torch.Generator().manual_seed(1)
            out, log_det = residual_log_det(
                branch,
                tokens,
                method=method,
                rate=0.5,
                key_padding_mask=mask,
                terms=3,
                generator=generator,
            )
            if method in ("exact", "causal"):
                found.append(log_det.value.detach())
            assert bool(torch.isfinite(log_det.value).all())
            grads = gradients(log_det.value, tokens, *branch.parameters())
            assert all(bool(torch.isfinite(g).all()) for g in grads)
            if mask is not None:
                assert not out[padding].any()
                assert not grads[0][padding].any()
        if found:
            torch.testing.assert_close(*found, rtol=0, atol=1e-12)

    def test_all_tokens_padded_is_zero(self, method: str) -> None:
        branch, x = self.branch(), torch.randn(2, 3, 4)
        padding = torch.tensor([[True] * 3, [False] * 3])
        value = residual_log_det(branch, x, method=method, rate=0.5, key_padding_mask=padding)[1].value
        assert value[0] == 0
        assert value[1] != 0

    def test_shape_gradient_and_no_grad(self, method: str) -> None:
        branch, x = self.branch(), torch.randn(3, 5, 4)
        generator = torch.Generator().manual_seed(1)
        out, log_det = residual_log_det(branch, x, method=method, rate=0.5, generator=generator)
        assert log_det.value.shape == (3,)
        assert out.requires_grad
        grads = torch.autograd.grad(log_det.value.sum(), list(branch.parameters()), allow_unused=True)
        named = dict(zip((n for n, _ in branch.named_parameters()), grads, strict=True))
        # A bias moves the output, not the Jacobian, unless an activation follows.
        assert {n for n, g in named.items() if g is None or not g.any()} <= {"module.1.down.bias"}
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                again = residual_log_det(
                    branch, x, method=method, rate=0.5, generator=torch.Generator().manual_seed(1)
                )
            assert not again[1].value.requires_grad
            assert not again[0].requires_grad
            torch.testing.assert_close(again[1].value, log_det.value.detach(), rtol=0, atol=1e-12)

    def test_gradient_reaches_earlier_blocks(self, method: str) -> None:
        branch, before = self.branch(), nn.Linear(4, 4)
        x = before(torch.randn(3, 5, 4))
        value = residual_log_det(branch, x, method=method, rate=0.5)[1].value
        value.sum().backward()
        assert before.weight.grad is not None
        assert before.weight.grad.any()

    def test_autocast_is_off_inside(self, method: str) -> None:
        branch = self.branch().float()
        x = torch.randn(2, 5, 4, dtype=torch.float32)
        plain = residual_log_det(
            branch, x, method=method, rate=0.5, generator=torch.Generator().manual_seed(1)
        )
        with torch.autocast("cpu", torch.bfloat16):
            cast = residual_log_det(
                branch, x, method=method, rate=0.5, generator=torch.Generator().manual_seed(1)
            )
            low = residual_log_det(branch, x.bfloat16(), method=method, rate=0.5)
        assert cast[1].value.dtype == low[1].value.dtype == torch.float32
        torch.testing.assert_close(cast[1].value, plain[1].value, rtol=0, atol=0)
        torch.testing.assert_close(cast[0], plain[0], rtol=0, atol=0)

    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    def test_a_freeze_without_a_graph_loses_no_gradient(self, method: str, context: type) -> None:
        """A solve comes first and derives the weights without a graph."""
        branch, x = self.branch(), torch.randn(2, 5, 4)
        parameters = list(branch.parameters())

        def value() -> Tensor:
            generator = torch.Generator().manual_seed(1)
            return residual_log_det(branch, x, method=method, rate=0.5, generator=generator)[1].value

        expected = gradients(value(), *parameters)
        with lf.frozen(branch):
            with context():
                branch(x)
                value()
            found = gradients(value(), *parameters)
        for one, e in zip(found, expected, strict=True):
            torch.testing.assert_close(one, e, rtol=0, atol=1e-12)

    def test_parameters_and_the_module_are_left_as_they_were(self, method: str) -> None:
        branch, x = self.branch(), torch.randn(2, 5, 4)
        residual_log_det(branch, x, method=method, rate=0.5)
        assert all(p.grad is None for p in branch.parameters())
        assert all(not getattr(m, "_freezing", False) for m in branch.modules())


def test_weights_are_derived_once(monkeypatch: pytest.MonkeyPatch) -> None:
    branch, x = (
        lf.Contractive(attention(causal=True, proj_coeff=1.0), 0.5, seq_len=4),
        torch.randn(2, 4, 4),
    )
    calls: list[lf.layers.SpectralBound] = []
    original = lf.layers.SpectralBound.factor

    def counted(self: lf.layers.SpectralBound, bound: Tensor, weight: Tensor) -> Tensor:
        calls.append(self)
        return original(self, bound, weight)

    monkeypatch.setattr(lf.layers.SpectralBound, "factor", counted)
    for method in METHODS:
        calls.clear()
        residual_log_det(branch, x, method=method, rate=0.5)
        assert len(calls) == len(set(calls)) == 3


class TestBadInput:
    def test_method(self) -> None:
        with pytest.raises(ValueError, match="exact, causal, series, roulette, got 'hutchinson'"):
            residual_log_det(nn.Linear(4, 4), torch.randn(2, 3, 4), method="hutchinson", rate=0.5)

    @pytest.mark.parametrize("rate", [0.0, 1.0, -0.5, 2.0, float("nan")])
    def test_rate(self, rate: float) -> None:
        with pytest.raises(ValueError, match=f"rate must be a certified constant in .*{rate}"):
            residual_log_det(nn.Linear(4, 4), torch.randn(2, 3, 4), method="series", rate=rate)

    @pytest.mark.parametrize("x", [torch.randn(3, 4), torch.zeros(2, 3, 4, dtype=torch.long), "x"])
    def test_event(self, x: Tensor) -> None:
        with pytest.raises(ValueError, match="tensor \\(B, T, D\\), got"):
            residual_log_det(nn.Linear(4, 4), x, method="series", rate=0.5)

    @pytest.mark.parametrize("name", ["terms", "probes"])
    @pytest.mark.parametrize("number", [0, 2.5, True])
    def test_numbers(self, name: str, number: object) -> None:
        with pytest.raises(ValueError, match=f"{name} must be an integer >= 1, got {number}"):
            residual_log_det(
                nn.Linear(4, 4),
                torch.randn(2, 3, 4),
                method="series",
                rate=0.5,
                **{name: number},  # type: ignore[arg-type]
            )

    def test_tokens_first(self) -> None:
        branch = lf.Contractive(lf.L2MultiheadAttention(4, 2, value_proj=True), 0.5, seq_len=4)
        with pytest.raises(ValueError, match="module \\(L2MultiheadAttention\\).*batch_first=False"):
            residual_log_det(branch, torch.randn(4, 4, 4), method="exact", rate=0.5)

    @pytest.mark.parametrize("method", METHODS)
    def test_dropout_in_training(self, method: str) -> None:
        branch = lf.Contractive(lf.FeedForward(4, 8, dropout=0.1), 0.5)
        x = torch.randn(2, 3, 4)
        with pytest.raises(ValueError, match="module.dropout \\(Dropout\\).*p=0.1"):
            residual_log_det(branch, x, method=method, rate=0.5)
        value = residual_log_det(branch.eval(), x, method="causal", rate=0.5)[1].value
        torch.testing.assert_close(value, log_det_oracle(branch, x), rtol=0, atol=1e-9)
        attending = lf.Contractive(attention(causal=True, dropout=0.2), 0.5, seq_len=3)
        with pytest.raises(ValueError, match="module \\(L2MultiheadAttention\\).*p=0.2"):
            residual_log_det(attending, x, method=method, rate=0.5)

    def test_shape_of_the_branch(self) -> None:
        for method in METHODS:
            with pytest.raises(ValueError, match="keep the shape"):
                residual_log_det(nn.Linear(4, 1), torch.randn(2, 3, 4), method=method, rate=0.5)

    def test_longer_than_certified(self) -> None:
        for module in (attention(causal=True), smooth_feed_forward()):
            branch = lf.Contractive(module, 0.5, seq_len=3)
            for method in METHODS:
                with pytest.raises(ValueError, match="is 3, got"):
                    residual_log_det(branch, torch.randn(2, 4, 4), method=method, rate=0.5)
