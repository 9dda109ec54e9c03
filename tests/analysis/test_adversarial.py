"""Adversarial tokens reach the lower bounds, which are the closed forms where those are known."""

from __future__ import annotations

import math

import pytest
import torch

from lipformer.analysis import (
    AttentionMaps,
    adversarial_measure,
    adversarial_tokens,
    ball_bound,
    ball_lower_bound,
    mean_field_bound,
    mean_field_lower_bound,
    measure_gain,
)
from tests.analysis.jacobians import gains, normal, one_head, random_groups


@pytest.mark.parametrize("logit", [-2.0, -0.7, 1.0, 6.0])
@pytest.mark.parametrize("n", [2, 3, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_closed_form(logit: float, n: int, causal: bool) -> None:
    """One head, W = I, A = logit I in the notes' formulas, and the Jacobian's block of the outlier."""
    radius, g = 1.3, max(-logit, logit / 8)
    maps = one_head(logit, dim=2, causal=causal)
    seen = range(2, n + 1) if causal else [n] * (n - 1)
    weights = [1 / (1 + (i - 1) * math.exp(-2 * g * radius**2)) for i in seen]
    expected = math.hypot(*(p + 2 * g * radius**2 * p * (1 - p) for p in weights))
    x = adversarial_tokens(maps, n, radius)
    if expected > 1 + 1e-6:
        assert ball_lower_bound(maps, n, radius) == pytest.approx(expected, rel=1e-6)
        jacobian = torch.func.jacrev(maps)(x)[1:, :, 0].flatten(0, 1)
        reached = float(torch.linalg.matrix_norm(jacobian, ord=2))
        assert reached == pytest.approx(expected, rel=1e-6)
    assert float(gains(maps, x[None])) >= max(1.0, expected) * (1 - 1e-9)
    assert float(x.norm(dim=-1).max()) <= radius


def test_random_maps_reach_their_lower_bounds() -> None:
    for maps, n in random_groups(24, largest=8):
        radius = 10 ** float(torch.rand(()) - 0.6)
        x = adversarial_tokens(maps, n, radius)
        lower, gain = ball_lower_bound(maps, n, radius), float(gains(maps, x[None]))
        assert lower <= gain * (1 + 1e-12)
        assert gain <= ball_bound(maps, n, radius)
        assert float(x.norm(dim=-1).max()) <= radius
        assert lower >= gain / 3, "the outlier's block is most of the Jacobian"
        if not maps.causal:
            reached = float(measure_gain(maps, *adversarial_measure(maps, radius)))
            assert mean_field_lower_bound(maps, radius) <= reached * (1 + 1e-9)
            assert reached <= mean_field_bound(maps, radius)


@pytest.mark.parametrize("g", [0.5, 2.0, 10.0])
def test_two_diracs(g: float) -> None:
    radius = 1.2
    points, masses = adversarial_measure(one_head(-g, dim=2), radius)
    assert float(masses.sum()) == pytest.approx(1.0)
    closed = 0.5 * (1 + g * radius**2) * math.exp(g * radius**2)
    lower = mean_field_lower_bound(one_head(-g, dim=2), radius)
    gain = float(measure_gain(one_head(-g, dim=2), points, masses))
    assert closed * (1 - 1e-8) <= lower <= gain
    assert lower <= 1.31 * closed
    assert gain <= mean_field_bound(one_head(-g, dim=2), radius)
    # The control: equal masses, or points on one side, are not as steep.
    assert float(measure_gain(one_head(-g, dim=2), points, torch.ones(2))) < 0.9 * gain
    assert float(measure_gain(one_head(-g, dim=2), points.abs(), masses)) < 0.9 * gain


def test_the_root_of_n() -> None:
    maps = one_head(-10.0)
    lower = [ball_lower_bound(maps, n, 1.0) for n in (11, 101)]
    assert lower[1] / lower[0] == pytest.approx(math.sqrt(10), rel=0.01)
    assert ball_lower_bound(maps, 1, 1.0) == pytest.approx(1.0, rel=1e-6)


def test_large_logits_stay_finite() -> None:
    maps = one_head(-1.0)
    assert math.isfinite(mean_field_lower_bound(maps, 1e3))
    assert math.isfinite(ball_lower_bound(maps, 50, 1e3))
    assert adversarial_measure(maps, 1e3)[1].min() > 0


def test_the_origin_where_values_cancel() -> None:
    """Two heads whose outliers cancel leave the gain ||W_1 + W_2|| at zero tokens."""
    values = normal(1, 2, 2)
    maps = AttentionMaps(torch.zeros(2, 2, 2, dtype=torch.float64), torch.cat([values, 2 * values]))
    x = adversarial_tokens(maps, 4, 1.0)
    norm = float(torch.linalg.matrix_norm(3 * values[0], ord=2))
    assert ball_lower_bound(maps, 4, 1.0) == pytest.approx(norm, rel=1e-6)
    assert float(x.abs().max()) == 0.0
    assert float(gains(maps, x[None])) == pytest.approx(norm, rel=1e-6)
