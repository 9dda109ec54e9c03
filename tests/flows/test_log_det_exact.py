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
    log_det,
    log_det_oracle,
    smooth_feed_forward,
    some_padding,
)

pytestmark = pytest.mark.usefixtures("float64")


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
    out, found = residual_log_det(branch, x, method="exact", rate=0.9, key_padding_mask=padding)
    torch.testing.assert_close(found.value, log_det_oracle(branch, x, padding), rtol=0, atol=1e-9)
    expected = branch(x, key_padding_mask=padding)
    if padding is not None:
        expected = expected.masked_fill(padding.unsqueeze(-1), 0.0)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert found.value.abs().min() > 1e-4
    assert found.truncation_error is not None
    assert not found.truncation_error.any()
    assert found.terms == 0


def test_the_gradient_is_that_of_the_log_determinant() -> None:
    branch = lf.Contractive(smooth_feed_forward(2, 4), 0.9)
    raw = branch.get_parameter("module.up.parametrizations.weight.original")

    def value(x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            raw.copy_(weight)
        found = log_det(branch, x, "exact").value
        # Through the module's own parameter, with the value of gradcheck's.
        (by_weight,) = torch.autograd.grad(found.sum(), raw, retain_graph=True)
        return found.sum() + ((weight - weight.detach()) * by_weight).sum()

    x = torch.randn(2, 3, 2, requires_grad=True)
    # Not the orthogonal start: there the spectral norm has a kink.
    weight = torch.randn_like(raw).requires_grad_()
    assert torch.autograd.gradcheck(value, (x, weight), atol=1e-6)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    branch, x = branches()["no mask"], torch.randn(2, 6, 4)
    whole = log_det(branch, x, "exact").value
    monkeypatch.setattr(_log_det_exact, "_BUDGET", 5 * 2 * 6 * 10)
    parts = log_det(branch, x, "exact").value
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-14)


def test_a_branch_that_does_not_depend_on_x() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones_like(x)

    for method in ("exact", "series", "roulette"):
        x = torch.randn(2, 3, 4)
        out, found = residual_log_det(Constant(), x, method=method, rate=0.5)
        assert not found.value.any()
        assert bool((out == 1).all())


METHODS = ("exact", "causal", "series", "roulette")


@pytest.mark.parametrize("method", METHODS)
class TestEveryMethod:
    def branch(self) -> lf.Contractive:
        parts = nn.Sequential(attention(causal=True), smooth_feed_forward())
        return lf.Contractive(parts, 0.5, seq_len=6)

    def test_padded_tokens_change_nothing_whatever_they_hold(self, method: str) -> None:
        branch, padding = self.branch(), torch.arange(6).ge(4).expand(3, 6)
        x = torch.randn(3, 6, 4)
        poisoned = x.masked_fill(padding.unsqueeze(-1), torch.nan).requires_grad_()
        out, found = residual_log_det(
            branch, poisoned, method=method, rate=0.5, key_padding_mask=padding
        )
        assert not out[padding].any()
        grads = gradients(found.value, poisoned, *branch.parameters())
        assert all(bool(torch.isfinite(g).all()) for g in (found.value, *grads))
        assert not grads[0][padding].any()
        if method in ("exact", "causal"):
            short = log_det(branch, x[:, :4], method, 0.5).value
            torch.testing.assert_close(found.value, short, rtol=0, atol=1e-12)

    def test_no_samples(self, method: str) -> None:
        assert log_det(self.branch(), torch.zeros(0, 3, 4), method, 0.5).value.shape == (0,)

    def test_each_sample_keeps_its_weight_in_a_loss(self, method: str) -> None:
        """The memory-saving gradient of the estimates is stored at once for all samples."""
        branch, x = self.branch(), torch.randn(2, 5, 4, requires_grad=True)

        def weighted(*weights: float) -> Tensor:
            value = log_det(branch, x, method, 0.5, seed=1).value
            return gradients(value * torch.tensor(weights), x)[0]

        first, second = weighted(1.0, 0.0), weighted(0.0, 1.0)
        assert not first[1].any()
        assert not second[0].any()
        assert second[1].any()
        torch.testing.assert_close(weighted(3.0, -2.0), 3 * first - 2 * second, rtol=1e-9, atol=1e-12)

    def test_all_tokens_padded_is_zero(self, method: str) -> None:
        branch, x = self.branch(), torch.randn(2, 3, 4)
        padding = torch.tensor([[True] * 3, [False] * 3])
        value = log_det(branch, x, method, 0.5, key_padding_mask=padding).value
        assert value[0] == 0
        assert value[1] != 0

    def test_shape_gradient_and_no_grad(self, method: str) -> None:
        branch, x = self.branch(), torch.randn(3, 5, 4)
        value = log_det(branch, x, method, 0.5, seed=1).value
        assert value.shape == (3,)
        grads = gradients(value, *branch.parameters())
        named = dict(zip((n for n, _ in branch.named_parameters()), grads, strict=True))
        # A bias moves the output, not the Jacobian, unless an activation follows.
        assert {n for n, g in named.items() if not g.any()} <= {"module.1.down.bias"}
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                again = log_det(branch, x, method, 0.5, seed=1).value
            assert not again.requires_grad
            torch.testing.assert_close(again, value.detach(), rtol=0, atol=1e-12)

    def test_gradient_reaches_earlier_blocks(self, method: str) -> None:
        branch, before = self.branch(), nn.Linear(4, 4)
        x = before(torch.randn(3, 5, 4))
        log_det(branch, x, method, 0.5).value.sum().backward()
        assert before.weight.grad is not None
        assert before.weight.grad.any()

    def test_autocast_is_off_inside(self, method: str) -> None:
        branch, x = self.branch().float(), torch.randn(2, 5, 4, dtype=torch.float32)
        plain = log_det(branch, x, method, 0.5, seed=1).value
        with torch.autocast("cpu", torch.bfloat16):
            cast = log_det(branch, x, method, 0.5, seed=1).value
            low = log_det(branch, x.bfloat16(), method, 0.5).value
        assert cast.dtype == low.dtype == torch.float32
        assert torch.equal(cast, plain)

    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    def test_a_freeze_without_a_graph_loses_no_gradient(self, method: str, context: type) -> None:
        """A solve comes first and derives the weights without a graph."""
        branch, x = self.branch(), torch.randn(2, 5, 4)
        parameters = list(branch.parameters())
        expected = gradients(log_det(branch, x, method, 0.5, seed=1).value, *parameters)
        with lf.frozen(branch):
            with context():
                branch(x)
                log_det(branch, x, method, 0.5)
            found = gradients(log_det(branch, x, method, 0.5, seed=1).value, *parameters)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)

    def test_what_is_refused(self, method: str) -> None:
        x = torch.randn(2, 4, 4)
        tokens_first = lf.Contractive(lf.L2MultiheadAttention(4, 2, value_proj=True), 0.5, seq_len=4)
        attending = lf.Contractive(attention(causal=True, dropout=0.2), 0.5, seq_len=4)
        branches: dict[str, nn.Module] = {
            r"module \(L2MultiheadAttention\).*batch_first=False": tokens_first,
            "p=0.2 in module": attending,
            "p=0.1 in module.dropout": lf.Contractive(lf.FeedForward(4, 8, dropout=0.1), 0.5),
            "keep the shape": nn.Linear(4, 1),
            "max_len is 3, got": lf.Contractive(attention(causal=True), 0.5, seq_len=3),
            "seq_len is 3, got": lf.Contractive(smooth_feed_forward(), 0.5, seq_len=3),
        }
        for message, branch in branches.items():
            with pytest.raises((ValueError, RuntimeError), match=message):
                log_det(branch, x, method, 0.5)
        log_det(attending.eval(), x, method, 0.5)

    def test_parameters_and_the_module_are_left_as_they_were(self, method: str) -> None:
        branch, x = self.branch(), torch.randn(2, 5, 4)
        log_det(branch, x, method, 0.5)
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
        log_det(branch, x, method, 0.5)
        assert len(calls) == len(set(calls)) == 3


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.5, 2.0, float("nan")])
def test_rates_that_are_no_contraction_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=f"rate must be a certified constant in .*{rate}"):
        log_det(nn.Linear(4, 4), torch.randn(2, 3, 4), "series", rate)


def test_second_derivatives_in_eval_mode_are_those_of_training() -> None:
    block = lf.InvertibleResidual(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 0.9).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    found = []
    for mode in (True, False):
        y, value = block.train(mode).forward_and_log_det(x, method="exact")
        (first,) = torch.autograd.grad(value.sum() - y.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [x, *block.parameters()]))
    torch.testing.assert_close(found[0], found[1])
