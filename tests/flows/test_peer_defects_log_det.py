"""Defects of other libraries' residual flows, each with a test that ours is free of it.

What they are and where they were seen is written in docs/flows.md.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.estimates.jacobian_products import differentiable_kernels
from lipformer.flows import residual_log_det
from lipformer.flows.log_det.series import Terms, continuation, signs, weighted_series
from lipformer.flows.masked_branch import masked_branch
from tests.flows.log_det_oracles import attention, log_det_oracle, smooth_feed_forward
from tests.oracles import dense_jacobian


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)


def block(coeff: float = 0.6, tokens: int = 3) -> lf.Contractive:
    parts = nn.Sequential(attention(2, 1, value_proj=False), smooth_feed_forward(2, 4))
    return lf.Contractive(parts, coeff, seq_len=tokens)


def inverse(branch: nn.Module, y: Tensor) -> Tensor:
    """x with x + f(x) = y, by plain iteration: at a rate of 0.6 to 1e-13."""
    x = y
    with lf.frozen(branch):
        for _ in range(60):
            x = y - branch(x)
    return x


class TestInverseLogDet:
    """torchflows: the wrong sign in the inverse; FrEIA: the inverse's evaluated at the wrong point."""

    def test_it_is_minus_the_forward_one_at_the_solution(self) -> None:
        branch, y = block(), 2 * torch.randn(1, 3, 2)
        jacobian = dense_jacobian(lambda t: inverse(branch, t), y)
        expected = torch.linalg.slogdet(jacobian).logabsdet
        x = inverse(branch, y).detach()
        found = -residual_log_det(branch, x, method="exact", rate=0.6)[1].value[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        # The controls: the other sign, and the right sign at the wrong point.
        assert (-found - expected).abs() > 1e-2
        assert (-log_det_oracle(branch, y)[0] - expected).abs() > 1e-5


class TestRoulette:
    """torchflows: a biased roulette that does not know the coefficient."""

    @pytest.mark.parametrize("coeff", [0.5, 0.9])
    def test_unbiased_at_the_coefficient(self, coeff: float) -> None:
        negated = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            negated.weight.copy_(-torch.eye(2))
        branch = lf.Contractive(negated, coeff)
        generator = torch.Generator().manual_seed(0)
        x = torch.zeros(4000, 1, 2)
        draws = residual_log_det(branch, x, method="roulette", rate=coeff, generator=generator)[1].value
        exact = 2 * math.log(1 - coeff)
        assert abs(draws.mean().item() - exact) <= 4 * draws.std().item() / math.sqrt(4000)

    def test_the_coefficient_decides_how_long_it_goes_on(self) -> None:
        assert continuation(0.5) < continuation(0.9) < continuation(0.97)
        branch, x = block(), torch.randn(64, 3, 2)
        terms = [
            residual_log_det(
                branch, x, method="roulette", rate=rate, generator=torch.Generator().manual_seed(0)
            )[1].terms
            for rate in (0.6, 0.97)
        ]
        assert terms[0] < terms[1]


class TestMemorySavingGradient:
    """normflows: every sample's gradient scaled by the first one's weight."""

    def test_each_sample_has_its_own_weight(self) -> None:
        branch, x = block(), torch.randn(3, 3, 2)
        probe = signs(x, None)
        # Roulette's weights, and three samples that stopped after 2, 5 and 3 terms.
        counts = torch.tensor([2, 5, 3])
        weights = [0.6 ** -max(0, k - 2) for k in range(1, 6)]
        outer = torch.tensor([1.0, -2.0, 0.5])  # and their weights in a loss

        def gradient(rows: slice, counts: Tensor) -> Tensor:
            running = [int((counts >= k).sum()) for k in range(1, 6)]
            terms = Terms(weights, running, (-counts).argsort().argsort())
            with differentiable_kernels():
                point = x[rows].clone().requires_grad_()
                out = masked_branch(branch, point, None)
                value = weighted_series(out, point, probe[rows], terms, gradient=True)
                return torch.autograd.grad((outer[rows] * value).sum(), point)[0]

        together = gradient(slice(None), counts)
        alone = [gradient(slice(b, b + 1), counts[b : b + 1]) for b in range(3)]
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-10, atol=1e-12)
        firsts = gradient(slice(None), counts[:1].expand(3))
        assert (firsts - together)[1].abs().max() > 1e-3  # the control


class TestGradient:
    """FrEIA: a log-determinant without a gradient."""

    @pytest.mark.parametrize("method", ["exact", "causal", "series", "roulette"])
    def test_it_trains_the_block(self, method: str) -> None:
        """Raising the log-determinant by its own gradient raises the exact one."""
        parts = nn.Sequential(attention(2, 1, causal=True), smooth_feed_forward(2, 4))
        branch = lf.Contractive(parts, 0.9, seq_len=3)
        x = torch.randn(16, 3, 2)
        optimizer = torch.optim.Adam(branch.parameters(), lr=5e-2)
        before = residual_log_det(branch, x, method="exact", rate=0.9)[1].value.mean().item()
        for _ in range(10):
            optimizer.zero_grad()
            value = residual_log_det(branch, x, method=method, rate=0.9, probes=2)[1].value
            (-value.mean()).backward()
            assert all(p.grad is not None for p in branch.module[0].parameters() if p.ndim == 2)  # type: ignore[index]
            optimizer.step()
        after = residual_log_det(branch, x, method="exact", rate=0.9)[1].value.mean().item()
        assert after > before + 0.1

    def test_through_normalised_weights(self) -> None:
        """The gradient of the raw weight is orthogonal to it: its scale has no effect."""
        branch = lf.Contractive(smooth_feed_forward(2, 4), 0.9)
        raw = branch.get_parameter("module.up.parametrizations.weight.original")
        with torch.no_grad():
            raw.add_(0.3 * torch.randn_like(raw))
        for method in ("exact", "causal", "series", "roulette"):
            value = residual_log_det(branch, torch.randn(4, 3, 2), method=method, rate=0.9)[1].value
            (gradient,) = torch.autograd.grad(value.sum(), raw)
            assert gradient.norm() > 1e-2
            assert abs((gradient * raw).sum().item()) <= 1e-5 * gradient.norm().item()


class TestGenerator:
    """normflows: NumPy's generator decides the number of terms."""

    def test_torch_decides_alone(self) -> None:
        branch, x = block(), torch.randn(4, 3, 2)
        found = []
        for seed in (0, 1):
            np.random.seed(seed)
            random.seed(seed)
            torch.manual_seed(5)
            found.append(residual_log_det(branch, x, method="roulette", rate=0.9)[1])
        assert found[0].terms == found[1].terms
        assert torch.equal(found[0].value, found[1].value)

    @pytest.mark.parametrize("generator", [0, random.Random(0)])
    def test_others_are_refused(self, generator: object) -> None:
        with pytest.raises(TypeError, match="torch.Generator or None, got"):
            residual_log_det(
                block(),
                torch.randn(1, 3, 2),
                method="roulette",
                rate=0.6,
                generator=generator,  # type: ignore[arg-type]
            )


def test_the_contraction_survives_training_without_a_call() -> None:
    """normflows: contraction lost unless update_lipschitz is called after each step."""
    branch, x = block(0.9), torch.randn(8, 3, 2)
    optimizer = torch.optim.SGD(branch.parameters(), lr=5.0)
    for _ in range(5):
        optimizer.zero_grad()
        residual_log_det(branch, x, method="series", rate=0.9)[1].value.mean().backward()
        optimizer.step()
    # Each eigenvalue of I + J is then within 0.9 of 1, whatever the weights have become.
    value = residual_log_det(branch, x, method="exact", rate=0.9)[1].value
    assert bool((value >= 6 * math.log(0.1)).all())
    assert bool((value <= 6 * math.log(1.9)).all())
