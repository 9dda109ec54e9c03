"""The truncated series: its mean over all probes, its bound, its gradient and its memory."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.estimates.jacobian_products import differentiable_kernels
from lipformer.flows.log_det.series import (
    all_terms,
    default_terms,
    signs,
    token_ramp,
    truncation_error,
    weighted_series,
)
from lipformer.flows.masked_branch import masked_branch
from lipformer.functional.pullback import pull
from lipformer.layers import Call
from tests.flows.log_det_oracles import (
    all_signs,
    attention,
    gradients,
    log_det,
    log_det_oracle,
    small_branches,
)

pytestmark = pytest.mark.usefixtures("float64")
NAMES = ["attention", "feed-forward", "both", "minus the identity"]


def mean_over_all_probes(branch: nn.Module, x: Tensor, terms: int, *, ramp: bool = False) -> Tensor:
    """The estimate's expectation at one event x (T, D), exactly, with its gradient."""
    probes = all_signs(*x.shape)
    with differentiable_kernels():
        point = x.expand(len(probes), *x.shape)
        point = point if point.requires_grad else point.detach().requires_grad_()
        out = masked_branch(branch, point, Call())
        scale = token_ramp(point) if ramp else None
        every = all_terms(terms, probes)
        return weighted_series(out, point, probes, every, ramp=scale, gradient=True).mean()


def truncated_oracle(branch: nn.Module, x: Tensor, terms: int) -> Tensor:
    """sum_k (-1)^(k+1) tr(J^k) / k from the dense Jacobian, differentiable."""
    with differentiable_kernels():
        jacobian = torch.autograd.functional.jacobian(
            lambda t: masked_branch(branch, t[None], Call())[0], x, create_graph=True
        ).reshape(x.numel(), -1)
    powers = [jacobian]
    for _ in range(1, terms):
        powers.append(powers[-1] @ jacobian)
    return torch.stack([(-1) ** k * power.trace() / (k + 1) for k, power in enumerate(powers)]).sum()


class TestMean:
    @pytest.mark.parametrize("terms", [1, 2, 5])
    @pytest.mark.parametrize("name", NAMES)
    def test_value_and_gradient_are_those_of_the_truncated_series(self, name: str, terms: int) -> None:
        branch = small_branches()[name]
        x = torch.randn(3, 2, requires_grad=True)
        inputs = (x, *branch.parameters())
        mean, expected = mean_over_all_probes(branch, x, terms), truncated_oracle(branch, x, terms)
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-11)
        found, dense = gradients(mean, *inputs), gradients(expected, *inputs)
        torch.testing.assert_close(found, dense, rtol=1e-8, atol=1e-10)

    @pytest.mark.parametrize("coeff", [0.3, 0.9])
    @pytest.mark.parametrize("terms", [1, 3, 10])
    @pytest.mark.parametrize("name", NAMES)
    def test_within_the_reported_bound(self, name: str, terms: int, coeff: float) -> None:
        branch = small_branches(coeff)[name]
        x = torch.randn(3, 2)
        exact = log_det_oracle(branch, x[None])[0]
        error = (mean_over_all_probes(branch, x, terms) - exact).abs().item()
        bound = log_det(branch, x[None], "series", coeff, terms=terms).truncation_error
        assert bound is not None
        assert error <= bound.item()
        if name == "minus the identity":
            # Every term has one sign: the bound is tight up to the terms beyond the next.
            assert error >= 0.5 * bound.item() * (1 - coeff)

    def test_many_terms_give_the_exact_gradient(self) -> None:
        branch, x = small_branches(0.5)["both"], torch.randn(3, 2, requires_grad=True)
        inputs = (x, *branch.parameters())
        expected = gradients(log_det(branch, x[None], "exact", 0.5).value, *inputs)
        found = gradients(mean_over_all_probes(branch, x, 50), *inputs)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)

    def test_padded_tokens_have_no_part_in_the_bound(self) -> None:
        branch = small_branches()["attention"]
        padding = torch.tensor([[False, False, True], [False, True, True]])
        found = log_det(branch, torch.randn(2, 3, 2), "series", terms=4, key_padding_mask=padding)
        expected = truncation_error(0.9, 4) * torch.tensor([4.0, 2.0])
        torch.testing.assert_close(found.truncation_error, expected)

    def test_float32_bounds_are_rounded_up(self) -> None:
        branch = small_branches()["attention"].float()
        x = torch.randn(2, 3, 2, dtype=torch.float32)
        bound = log_det(branch, x, "series", terms=7).truncation_error
        assert bound is not None
        assert bound.dtype == torch.float32
        assert bound.double().min() > 6 * truncation_error(0.9, 7)


class TestTerms:
    @pytest.mark.parametrize("rate", [0.01, 0.5, 0.9])
    def test_the_default_reaches_a_hundredth_of_a_nat(self, rate: float) -> None:
        n = default_terms(rate)
        assert truncation_error(rate, n) <= 0.01
        assert n == 1 or truncation_error(rate, n - 1) > 0.01

    def test_forty_at_the_most(self) -> None:
        assert default_terms(0.97) == default_terms(0.999) == 40
        branch = small_branches()["attention"]
        assert log_det(branch, torch.randn(1, 3, 2), "series", 0.99).terms == 40

    @pytest.mark.parametrize(("rate", "terms"), [(0.5, 5), (0.9, 20), (0.97, 40)])
    def test_the_bound_is_above_the_sum_it_bounds(self, rate: float, terms: int) -> None:
        tail = math.fsum(rate**k / k for k in range(terms + 1, terms + 5000))
        assert tail <= truncation_error(rate, terms) <= 2.5 * tail


def _saved_bytes(branch: nn.Module, x: Tensor, terms: int, naive: bool = False) -> int:
    """Bytes that autograd keeps from a forward pass until its backward pass."""
    # The storages themselves: the address of one that is gone may be given to another.
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        if naive:
            with differentiable_kernels():
                point = x.requires_grad_()
                out = masked_branch(branch, point, Call())
                power = probe = signs(out, None)
                held = []  # a term of a graph of its own
                for _ in range(terms):
                    power = pull(out, point, power, create_graph=True)
                    held.append((power * probe).sum())
        else:
            held = [log_det(branch, x, "series", terms=terms).value]
    return sum(storage.nbytes() for storage in saved.values())


def test_memory_does_not_grow_with_the_number_of_terms() -> None:
    branch = lf.Contractive(attention(8, 2), 0.9, seq_len=16)
    x = torch.randn(4, 16, 8)
    few, many = _saved_bytes(branch, x, 5), _saved_bytes(branch, x, 40)
    assert many == few > 0
    # The control: terms that keep their graphs do grow.
    assert _saved_bytes(branch, x, 10, naive=True) > 1.8 * _saved_bytes(branch, x, 5, naive=True)


class TestProbes:
    def test_rademacher(self) -> None:
        v = signs(torch.empty(1000, 3, 2), torch.Generator().manual_seed(0))
        assert set(v.unique().tolist()) == {-1.0, 1.0}
        assert v.mean(0).abs().max() < 4 / math.sqrt(1000)

    def test_a_generator_may_live_on_another_device(self) -> None:
        """The meta device stands for a GPU: nothing is drawn on it, so the draw was elsewhere."""
        like, generator = torch.empty(2, 3, 2, device="meta"), torch.Generator()
        before = generator.get_state()
        assert signs(like, generator).device == like.device
        assert not torch.equal(before, generator.get_state())

    @pytest.mark.parametrize("method", ["series", "roulette"])
    def test_seeds(self, method: str) -> None:
        """torch's generators decide, and neither NumPy's nor Python's."""
        branch, x = small_branches()["both"], torch.randn(4, 3, 2)
        before = torch.random.get_rng_state()
        first, again, other = (log_det(branch, x, method, seed=seed).value for seed in (3, 3, 4))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert torch.equal(before, torch.random.get_rng_state())
        found = []
        for seed in (0, 1):
            np.random.seed(seed)
            random.seed(seed)
            torch.manual_seed(7)
            found.append(log_det(branch, x, method).value)
        assert torch.equal(*found)

    def test_more_probes_less_noise(self) -> None:
        branch, x = small_branches()["attention"], torch.randn(3, 2).expand(500, 3, 2)
        spread = [log_det(branch, x, "series", terms=5, probes=probes).value.std() for probes in (1, 8)]
        assert 2.0 < (spread[0] / spread[1]).item() < 4.0  # sqrt(8) = 2.83


class TestOwnTokenRate:
    """Blocks that contract each token's own map alone: the powers of J may grow before they fall."""

    def branch(self, tokens: int = 3) -> lf.Contractive:
        layer = attention(2, 1, causal=True, value_proj=False)
        with torch.no_grad():  # a soft kernel: every token looks at all earlier ones
            layer.log_temperature.fill_(-6.0)  # type: ignore[union-attr]
        return lf.Contractive(layer, 0.9, norm="self", seq_len=tokens)

    def test_the_ramp_keeps_the_mean(self) -> None:
        branch, x = self.branch(), torch.randn(3, 2, requires_grad=True)
        inputs = (x, *branch.parameters())
        plain = mean_over_all_probes(branch, x, 6)
        ramped = mean_over_all_probes(branch, x, 6, ramp=True)
        torch.testing.assert_close(plain, ramped, rtol=0, atol=1e-10)
        found, expected = gradients(ramped, *inputs), gradients(plain, *inputs)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_ramp_tames_the_noise(self, dtype: torch.dtype) -> None:
        class Drift(nn.Module):
            """J = -L on the diagonal and large below it: powers grow like binomials at first."""

            def forward(self, x: Tensor) -> Tensor:
                earlier = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
                return -0.5 * x + 3.0 * torch.tanh(earlier)

        @lf.register_bound(Drift)
        def _(module: Drift, ask: lf.certificate.Ask) -> float:
            return 0.5

        x = 0.1 * torch.randn(1, 8, 2).expand(400, 8, 2).to(dtype)
        exact = 16 * math.log(0.5)
        spreads = {}
        for norm in ("self", "l2"):  # only the first is true of Drift, and only it gets the ramp
            branch = lf.Contractive(Drift(), 0.5, norm=norm, seq_len=8)
            value = log_det(branch, x, "series", 0.5, terms=30).value
            spreads[norm] = value.std().item()
            if norm == "self":
                # Its blocks are multiples of the identity, of which one probe knows the trace.
                torch.testing.assert_close(
                    value.mean().item(), exact, rtol=0, atol=4 * spreads[norm] / math.sqrt(400) + 1e-3
                )
        assert spreads["self"] < 1.0
        assert spreads["l2"] > 20.0

    def test_within_its_bound_too(self) -> None:
        branch, x = self.branch(), torch.randn(3, 2)
        exact = log_det_oracle(branch, x[None])[0]
        for terms in (2, 10):
            error = (mean_over_all_probes(branch, x, terms, ramp=True) - exact).abs().item()
            assert error <= 6 * truncation_error(0.9, terms)

    @pytest.mark.parametrize(
        ("tokens", "dtype"),
        [(2, torch.float32), (512, torch.float32), (64, torch.float64), (64, torch.float16)],
    )
    def test_the_ramp_stays_in_range(self, tokens: int, dtype: torch.dtype) -> None:
        ramp = token_ramp(torch.empty(1, tokens, 2, dtype=dtype))
        assert ramp.shape == (tokens, 1)
        assert bool(torch.isfinite(ramp).all())
        assert bool((ramp[1:] >= ramp[:-1]).all())
        assert ramp[-1] > ramp[0]
        assert bool((1 / ramp > 64 * torch.finfo(dtype).tiny).all())
