"""Russian roulette: unbiased in value and gradient, with a variance that is finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lipformer.flows.log_det import methods as _log_det
from lipformer.flows.log_det import series as _log_det_series
from lipformer.flows.log_det.series import (
    EXACT_TERMS,
    continuation,
    draw_counts,
    roulette_terms,
    roulette_weight,
)
from lipformer.functional.pullback import pull
from tests.flows.log_det_oracles import gradients, log_det, log_det_oracle, small_branches

pytestmark = pytest.mark.usefixtures("float64")


DRAWS = 4000


class TestWeights:
    @pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 0.97])
    def test_their_mean_is_one_for_every_term(self, rate: float) -> None:
        """By enumeration of n, with the probabilities that draw_counts states."""
        most, q = 40, continuation(rate)
        n = torch.arange(EXACT_TERMS, most + 1)
        probability = q ** (n - EXACT_TERMS).double() * (1 - q)
        probability[-1] /= 1 - q  # n >= most: all those weigh the first ``most`` terms alike
        for k in range(1, most + 1):
            reached = probability[n >= k].sum().item()
            assert roulette_weight(k, rate, EXACT_TERMS) * reached == pytest.approx(1.0, rel=1e-12)

    @pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
    def test_counts_have_the_stated_distribution(self, rate: float) -> None:
        counts = draw_counts(20000, rate, 3, torch.Generator().manual_seed(0))
        assert counts.min() == 3
        for j in range(1, 6):
            reached = (counts >= 3 + j).double().mean().item()
            p = continuation(rate) ** j
            assert abs(reached - p) <= 4 * math.sqrt(p * (1 - p) / 20000) + 1e-12

    @pytest.mark.parametrize("rate", [1e-3, 0.1, 0.5, 0.9, 0.97, 0.999])
    def test_variance_is_finite(self, rate: float) -> None:
        """L^2 < 1 - p strictly, and the series of the second moment converges."""
        q = continuation(rate)
        assert rate**2 < q < 1
        assert rate**2 / q <= rate * (1 + 1e-12)

    def test_weighted_terms_never_grow(self) -> None:
        rate = 0.9
        for k in range(1, 301):
            assert roulette_weight(k, rate, EXACT_TERMS) * rate**k <= rate * (1 + 1e-9)

    def test_each_sample_is_as_likely_to_go_on_as_any_other(self) -> None:
        """The host sorts the numbers of terms; the permutation makes them independent again."""
        generator, draws = torch.Generator().manual_seed(0), 4000
        reached = torch.zeros(5)
        for _ in range(draws):
            terms = roulette_terms(torch.empty(5), 0.9, EXACT_TERMS, generator)
            running = terms.running[6] if len(terms.running) > 6 else 0
            reached += terms.rank < running
        p = 0.9 ** (7 - EXACT_TERMS)
        assert bool(((reached / draws - p).abs() <= 4 * math.sqrt(p * (1 - p) / draws)).all())


def within(draws: Tensor, exact: Tensor, errors: float = 4.0) -> None:
    """The mean over the first dimension agrees with ``exact`` to so many standard errors."""
    error = draws.std(0) / math.sqrt(len(draws))
    assert bool(((draws.mean(0) - exact).abs() <= errors * error + 1e-12).all()), (
        draws.mean(0) - exact
    ) / error


class TestUnbiased:
    @pytest.mark.parametrize("coeff", [0.5, 0.9])
    @pytest.mark.parametrize("name", list(small_branches()))
    def test_value_and_gradient_in_4000_draws(self, name: str, coeff: float) -> None:
        branch = small_branches(coeff)[name]
        one = torch.randn(1, 3, 2)
        # One event as a batch: each sample has a probe and a number of terms of its own.
        x = one.repeat(DRAWS, 1, 1).requires_grad_()
        found = log_det(branch, x, "roulette", coeff, seed=0)
        assert found.truncation_error is None
        exact = log_det_oracle(branch, one)[0]
        within(found.value.detach(), exact)
        spread = found.value.detach().std().item()
        assert 0 < spread < 5
        point = one.clone().requires_grad_()
        expected = log_det(branch, point, "exact", coeff).value
        within(gradients(found.value, x)[0], gradients(expected, point)[0][0])

    def test_several_probes(self) -> None:
        branch, one = small_branches()["both"], torch.randn(1, 3, 2)
        draws = log_det(branch, one.expand(1000, 3, 2), "roulette", probes=3)
        within(draws.value.detach(), log_det_oracle(branch, one)[0])

    def test_gradient_of_the_weights(self) -> None:
        branch = small_branches()["both"]
        parameters = list(branch.parameters())
        one = torch.randn(1, 3, 2)
        expected = gradients(log_det(branch, one, "exact").value, *parameters)
        draws = []
        for seed in range(25):
            value = log_det(branch, one.expand(160, 3, 2), "roulette", seed=seed).value
            draws.append(gradients(value / 160, *parameters))
        for column, e in zip(zip(*draws, strict=True), expected, strict=True):
            within(torch.stack(column), e, errors=4.5)

    def test_the_draws_would_see_a_bias(self) -> None:
        """The control: the plain sum of the terms drawn, as if every weight were one."""
        coeff = 0.9
        branch = small_branches(coeff)["minus the identity"]
        one = torch.randn(1, 3, 2)
        exact = log_det_oracle(branch, one)[0]
        counts = draw_counts(DRAWS, coeff, EXACT_TERMS, torch.Generator().manual_seed(0))
        powers = torch.tensor([math.fsum(-(coeff**k) / k for k in range(1, int(n) + 1)) for n in counts])
        with pytest.raises(AssertionError):
            within(6 * powers, exact)

    def test_more_exact_terms_less_noise(self) -> None:
        branch, x = small_branches()["minus the identity"], torch.randn(1, 3, 2).expand(1000, 3, 2)
        spread = [log_det(branch, x, "roulette", terms=terms).value.std() for terms in (1, 20)]
        assert spread[1] < 0.3 * spread[0]


class TestDraws:
    def test_samples_that_have_stopped_cost_no_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And leaving them out changes nothing."""
        branch = small_branches()["both"]
        x = torch.randn(64, 3, 2, requires_grad=True)
        padding = torch.arange(3) >= torch.randint(1, 4, (64, 1))
        passes: list[int] = []

        def run() -> tuple[Tensor, list[Tensor]]:
            passes.clear()
            value = log_det(branch, x, "roulette", seed=0, key_padding_mask=padding).value
            return value.detach(), gradients(value, x, *branch.parameters())

        def counted(out: Tensor, at: Tensor, weight: Tensor, **options: bool) -> Tensor:
            passes.append(len(at))
            return pull(out, at, weight, **options)

        monkeypatch.setattr(_log_det_series, "pull", counted)
        value, grads = run()
        spent = sum(passes)
        needed = int(draw_counts(64, 0.9, EXACT_TERMS, torch.Generator().manual_seed(0)).sum())
        assert needed <= spent <= 2 * needed + 64
        whole = _log_det_series.weighted_series
        monkeypatch.setattr(
            _log_det, "weighted_series", lambda *a, restrict, **options: whole(*a, **options)
        )
        expected, expected_grads = run()
        assert sum(passes) > 1.5 * spent
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-11)
        torch.testing.assert_close(grads, expected_grads, rtol=1e-9, atol=1e-10)

    def test_each_sample_has_its_own(self) -> None:
        branch = small_branches()["minus the identity"]
        x = torch.randn(1, 3, 2).expand(50, 3, 2)
        # J is -0.9 I, so a probe makes no noise: what differs is the number of terms.
        value = log_det(branch, x, "roulette").value
        assert len(value.detach().unique()) > 10

    def test_terms_are_those_of_the_longest(self) -> None:
        branch, x = small_branches()["attention"], torch.randn(5, 3, 2)
        counts = draw_counts(5, 0.9, EXACT_TERMS, torch.Generator().manual_seed(2))
        assert log_det(branch, x, "roulette", seed=2).terms == counts.max()
