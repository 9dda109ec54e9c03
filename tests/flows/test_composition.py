"""Stacks of blocks and flows of them: what composes, and densities that are the same each time."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, MultivariateNormal, Normal

import lipformer as lf
from lipformer.flows import (
    ActNorm,
    AttentionFlow,
    ContextAffine,
    Flow,
    InvertibleLinear,
    InvertibleResidual,
    InvertibleSequential,
    Permutation,
    residual_log_det,
)
from lipformer.flows.log_det import exact, methods
from tests.flows.test_adapters import HOSTS
from tests.oracles import dense_jacobian

T, D = 5, 4
F64 = torch.float64


def attention(**options: Any) -> InvertibleResidual:
    branch = lf.L2MultiheadAttention(D, 2, batch_first=True, value_proj=True)
    return InvertibleResidual(branch, 0.9, seq_len=T, **options)


def blocks() -> list[nn.Module]:
    inner = InvertibleSequential(Permutation(D), InvertibleResidual(lf.FeedForward(D, 8), 0.8))
    return [ActNorm(D), InvertibleLinear(D), attention(), inner, ActNorm(D)]


def scrambled(module: Any, dtype: torch.dtype = F64) -> Any:
    """In eval mode, with weights of any size."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module.to(dtype).eval()


@pytest.fixture
def stack() -> InvertibleSequential:
    return scrambled(InvertibleSequential(*blocks()))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, T, D, dtype=F64)


def padded() -> Tensor:
    mask = torch.zeros(3, T, dtype=torch.bool)
    mask[1, 3:] = True
    return mask


class TestInvertibleSequential:
    def test_it_is_its_blocks_in_order(self, stack: InvertibleSequential, x: Tensor) -> None:
        y = x
        for block in stack:
            y = block(y)
        torch.testing.assert_close(stack(x), y)
        torch.testing.assert_close(stack[2:](stack[:2](x)), y)
        assert len(stack) == 5
        assert isinstance(stack[3], InvertibleSequential)

    @pytest.mark.parametrize("mask", [None, padded()], ids=["whole", "padded"])
    def test_the_log_det_is_that_of_the_dense_jacobian_both_ways(
        self, stack: InvertibleSequential, x: Tensor, mask: Tensor | None
    ) -> None:
        y, log_det = stack.forward_and_log_det(x, mask)
        torch.testing.assert_close(y, stack(x, mask))
        for b in range(3):
            one = None if mask is None else mask[b : b + 1]
            jacobian = dense_jacobian(lambda t, one=one: stack(t, one), x[b : b + 1])
            expected = torch.linalg.slogdet(jacobian).logabsdet
            torch.testing.assert_close(log_det[b], expected, rtol=0, atol=1e-6)
        back, minus = stack.inverse_and_log_det(y, mask, tol=1e-13)
        torch.testing.assert_close(back, x, rtol=0, atol=1e-9)
        torch.testing.assert_close(minus, -log_det, rtol=0, atol=1e-8)
        torch.testing.assert_close(stack.inverse(y, mask, tol=1e-13), x, rtol=0, atol=1e-9)

    def test_options_reach_nested_blocks(self, stack: InvertibleSequential, x: Tensor) -> None:
        with pytest.raises(lf.flows.NotConverged, match="max_iter=1 "):
            stack[3:].inverse(x, max_iter=1)
        stack.inverse(x, tol=1e-3)
        assert [record is not None for record in stack.record] == [False, False, True, True, False]
        assert float(stack.record[2].tolerance.max()) > 1e-4
        stack.forward_and_log_det(x, method="series", generator=torch.Generator().manual_seed(1))
        assert stack.log_det_record.method == "series"
        assert stack[3].log_det_record.method == "series"

    def test_errors_of_the_blocks_add_up(self, x: Tensor) -> None:
        stack = scrambled(InvertibleSequential(attention(probes=2), ActNorm(D), attention(probes=2)))
        _, log_det = stack.forward_and_log_det(x, method="series")
        record = stack.log_det_record
        parts = [block.log_det_record for block in (stack[0], stack[2])]
        torch.testing.assert_close(record.value, log_det.detach())
        for name in ("truncation_error", "standard_error"):
            total = sum(getattr(part, name) for part in parts)
            assert float(total.min()) > 0
            torch.testing.assert_close(getattr(record, name), total)
        stack.forward_and_log_det(x, method="roulette")
        assert stack.log_det_record.truncation_error is None
        assert copy.deepcopy(stack).log_det_record is None

    def test_the_bound_is_at_most_the_product(self, stack: InvertibleSequential, x: Tensor) -> None:
        certificate = lf.certify(stack)
        product = 1.0
        for block in stack:
            product *= lf.certify(block).bound
        assert 0.9 * product < certificate.bound < product, "paths gain a little here"
        assert torch.linalg.matrix_norm(dense_jacobian(stack, x[:1]), 2).item() <= certificate.bound
        twice = InvertibleSequential(stack[1], stack[1])
        assert lf.certify(twice).bound == pytest.approx(lf.certify(stack[1]).bound ** 2)

    def test_saved_loaded_and_baked_it_is_the_same(self, stack: InvertibleSequential, x: Tensor) -> None:
        file = io.BytesIO()
        torch.save(stack.state_dict(), file)
        file.seek(0)
        other = InvertibleSequential(*blocks()).double().eval()
        other.load_state_dict(torch.load(file, weights_only=True))
        for twin in (other, copy.deepcopy(stack), lf.bake(stack)):
            torch.testing.assert_close(twin(x), stack(x))
            torch.testing.assert_close(
                twin.forward_and_log_det(x)[1], stack.forward_and_log_det(x)[1], rtol=0, atol=1e-8
            )

    def test_a_module_without_an_inverse_is_refused(self) -> None:
        with pytest.raises(TypeError, match="forward_and_log_det.*got Linear"):
            InvertibleSequential(ActNorm(D), nn.Linear(D, D))

    def test_a_mask_is_never_dropped(self, x: Tensor) -> None:
        class Bare(ActNorm):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x)

        stack = InvertibleSequential(Bare(D)).double().eval()
        stack(x)
        with pytest.raises(TypeError, match="key_padding_mask"):
            stack(x, padded())


BASES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "numbers": lambda: Normal(torch.tensor(0.5, dtype=F64), 2.0),
    "tokens": lambda: MultivariateNormal(torch.zeros(D, dtype=F64), 2.0 * torch.eye(D, dtype=F64)),
    "events": lambda: Independent(Normal(torch.zeros(T, D, dtype=F64), 3.0), 2),
}


class TestFlow:
    @pytest.mark.parametrize("name", BASES)
    def test_the_density_is_the_change_of_variables(self, name: str, x: Tensor) -> None:
        base = BASES[name]()
        flow = scrambled(Flow(blocks(), base, dim=D, seq_len=T))
        got = flow.log_prob(x)
        noise = flow(x)
        prior = (Normal(0.0, 1.0) if base is None else base).log_prob(noise).reshape(3, -1).sum(-1)
        for b in range(3):
            log_det = torch.linalg.slogdet(dense_jacobian(flow, x[b : b + 1])).logabsdet
            torch.testing.assert_close(got[b], prior[b] + log_det, rtol=0, atol=1e-6)
        drawn = flow.sample(2, generator=torch.Generator().manual_seed(1), tol=1e-12)
        assert drawn.shape == (2, T, D)
        again = flow.sample(2, generator=torch.Generator().manual_seed(1), tol=1e-12)
        assert torch.equal(drawn, again)
        assert torch.isfinite(flow.log_prob(drawn)).all()
        torch.testing.assert_close(flow.inverse(flow(x), tol=1e-13), x, rtol=0, atol=1e-9)

    def test_shapes_come_from_base_and_blocks(self) -> None:
        flow = Flow([attention()], BASES["events"]())
        assert (flow.dim, flow.seq_len) == (D, T)
        assert Flow([attention(), ActNorm(D)]).dim == D
        with pytest.raises(ValueError, match="sample needs dim"):
            Flow([attention()], seq_len=T).sample(1)
        with pytest.raises(ValueError, match=r"tensors \(B, T, 4\), got \(2, 5, 3\)"):
            flow.log_prob(torch.zeros(2, T, 3))
        with pytest.raises(ValueError, match="seq_len=5, got 6 tokens"):
            flow.double().log_prob(torch.zeros(2, 6, D, dtype=F64))
        with pytest.raises(ValueError, match=r"got \(3, 4\): x\[:, None\] is events of one token"):
            flow.log_prob(torch.zeros(3, D))

    def test_parts_agree_on_the_shape(self) -> None:
        for build in (
            lambda: InvertibleSequential(ActNorm(D), InvertibleSequential(Permutation(2))),
            lambda: Flow([ActNorm(D)], Independent(Normal(torch.zeros(T, 2), 1.0), 2)),
            lambda: Flow([ActNorm(D)], dim=2),
        ):
            with pytest.raises(ValueError, match="has one dim, got parts with dim=(4, 2|2, 4)"):
                build()
        with pytest.raises(ValueError, match="has one context_dim, got parts with context_dim=3, 2"):
            InvertibleSequential(ContextAffine(D, 3), ContextAffine(D, 2))
        with pytest.raises(ValueError, match="has one seq_len, got parts with seq_len=6, 5"):
            Flow([ActNorm(D)], BASES["events"](), seq_len=6)
        with pytest.raises(ValueError, match=r"events \(T, D\), got \(2, 5, 4\)"):
            Flow([ActNorm(D)], Normal(torch.zeros(2, T, D), 1.0))

    def test_nothing_fits_a_base_by_broadcasting(self) -> None:
        base = Normal(torch.zeros(T, D, dtype=F64), 1.0)
        x = torch.zeros(3, 1, D, dtype=F64)
        assert base.log_prob(x).shape == (3, T, D), "the base would count one token five times"
        flow = Flow([ActNorm(D)], base).double()
        with pytest.raises(ValueError, match=r"is one of events \(5, 4\), got noise \(3, 1, 4\)"):
            flow.log_prob(x)

        class Summed:
            def log_prob(self, noise: Tensor) -> Tensor:
                return noise.sum()

        flow.base = Summed()
        with pytest.raises(ValueError, match=r"log_prob of shape \(\) for noise \(3, 1, 4\)"):
            flow.log_prob(x)

    def test_a_flow_is_a_block(self, x: Tensor) -> None:
        flow = scrambled(Flow(blocks(), dim=D))
        stack = InvertibleSequential(flow, ActNorm(D)).double().eval()
        y, log_det = stack.forward_and_log_det(x)
        torch.testing.assert_close(log_det, flow.forward_and_log_det(x)[1])
        torch.testing.assert_close(stack.inverse(y, tol=1e-13), x, rtol=0, atol=1e-9)


def numbers(call: Callable[[], Tensor]) -> Tensor:
    """The result, called twice: a density in eval mode must not be random."""
    first = call()
    torch.rand(7)
    assert torch.equal(first, call()), "the same event, another density"
    return first.detach()


def drawn(block: Any, x: Tensor) -> Tensor:
    """What must not happen in eval mode."""
    return block.forward_and_log_det(x, generator=torch.default_generator, method="roulette")[1]


class TestEvalMode:
    def test_a_random_density_would_be_caught(self, x: Tensor) -> None:
        with pytest.raises(AssertionError, match="another density"):
            numbers(lambda: drawn(scrambled(attention()), x))

    @pytest.mark.parametrize("log_det", [None, "series", "roulette", "exact"])
    def test_a_block_is_exact(self, x: Tensor, log_det: str | None) -> None:
        block = scrambled(attention(log_det=log_det))
        y = block(x)
        found = numbers(lambda: block.forward_and_log_det(x)[1])
        assert block.log_det_record.method == "exact"
        expected = torch.linalg.slogdet(dense_jacobian(block, x[1:2])).logabsdet
        torch.testing.assert_close(found[1], expected, rtol=0, atol=1e-6)
        minus = numbers(lambda: block.inverse_and_log_det(y, tol=1e-13)[1])
        torch.testing.assert_close(minus, -found, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("host", HOSTS)
    def test_and_so_it_is_through_every_adapter(self, host: str) -> None:
        block, x = scrambled(attention(), torch.float32), torch.randn(3, T, D)
        found = numbers(lambda: HOSTS[host](block).log_prob(x))
        noise, log_det = block.forward_and_log_det(x, method="exact")
        expected = Normal(0.0, 1.0).log_prob(noise).sum((1, 2)) + log_det
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-5)

    def test_beyond_what_is_affordable_the_errors_are_told(
        self, x: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flow = scrambled(AttentionFlow(D, depth=1, num_heads=2, hidden=8, seq_len=T))
        true = numbers(lambda: flow.log_prob(x))
        record = flow.log_det_record
        assert (record.method, record.terms) == ("causal, exact", 0)
        assert not record.truncation_error.any()
        assert not record.standard_error.any()
        monkeypatch.setattr(methods, "EXACT_LIMIT", T * D - 1)
        found = numbers(lambda: flow.log_prob(x))
        record = flow.log_det_record
        assert record.method == "causal, series"
        assert float(record.truncation_error.max()) <= 0.1
        assert float(record.standard_error.min()) > 0.0
        error = (found - true).abs()
        assert bool((error > 0).all()), "it is an estimate"
        assert bool((error <= record.truncation_error + 5 * record.standard_error).all())
        # Equal events have equal densities, wherever in a batch they stand.
        torch.testing.assert_close(flow.log_prob(x.flip(0)).flip(0), found)
        torch.testing.assert_close(flow.log_prob(x[2:]), found[2:])

    def test_what_is_asked_for_is_honoured(self, x: Tensor) -> None:
        block = scrambled(attention())
        numbers(lambda: block.forward_and_log_det(x, method="roulette")[1])
        assert block.log_det_record.method == "roulette"
        seeds = [torch.Generator().manual_seed(s) for s in (1, 1, 2)]
        a, b, c = (block.forward_and_log_det(x, method="series", generator=g)[1] for g in seeds)
        assert torch.equal(a, b)
        assert not torch.equal(a, c)

    def test_in_training_it_is_an_estimate(self, x: Tensor) -> None:
        block = scrambled(attention()).train()
        assert not torch.equal(block.forward_and_log_det(x)[1], block.forward_and_log_det(x)[1])
        assert block.log_det_record.method == "roulette"

    @pytest.mark.parametrize("entries", [2**24, 1], ids=["at once", "one by one"])
    def test_exact_has_the_gradient_of_training_mode(
        self, entries: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(exact, "_ENTRIES", entries)
        monkeypatch.setattr(exact, "_BUDGET", 100)  # several chunks of rows
        block = scrambled(attention())
        x = torch.randn(3, T, D, dtype=F64, requires_grad=True)
        inputs = (x, *block.parameters())
        weight = torch.tensor([1.0, -2.0, 0.5], dtype=F64)

        def gradients(mode: bool) -> tuple[Tensor, ...]:
            block.train(mode)
            y, log_det = block.forward_and_log_det(x, padded(), method="exact")
            loss = (weight * log_det).sum() + y.square().sum()
            return torch.autograd.grad(loss, inputs, materialize_grads=True)

        for found, expected in zip(gradients(False), gradients(True), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)

    def test_gradcheck(self) -> None:
        block = scrambled(attention())
        x = torch.randn(2, 2, D, dtype=F64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda t: block.forward_and_log_det(t)[1], x)

    def test_gradients_reach_weights_that_are_called_in(self, x: Tensor) -> None:
        branch = scrambled(attention()).branch
        name = "module.out_proj.weight"

        class Density(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.branch = branch

            def forward(self, x: Tensor) -> Tensor:
                return residual_log_det(self.branch, x, method="exact", rate=0.9)[1].value

        def at(weight: Tensor) -> Tensor:
            return torch.func.functional_call(Density(), {f"branch.{name}": weight}, (x,)).sum()

        start = (2.0 * branch.get_parameter(name)).detach().requires_grad_()
        (grad,) = torch.autograd.grad(at(start), start)
        direction, step = torch.randn_like(start), 1e-6
        with torch.no_grad():
            slope = (at(start + step * direction) - at(start - step * direction)) / (2 * step)
        torch.testing.assert_close((grad * direction).sum(), slope, rtol=1e-6, atol=1e-8)

    def test_no_graph_is_kept_for_a_gradient_that_nobody_asks_for(self, x: Tensor) -> None:
        block = scrambled(attention())
        saved: list[int] = []

        def pack(t: Tensor) -> Tensor:
            saved.append(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            block(x)
            plain = sum(saved)
            saved.clear()
            kept = block.forward_and_log_det(x)
        assert kept[1].requires_grad
        # The pass and its point; a graph of T D passes would be a hundred times as large.
        assert sum(saved) < 10 * plain
