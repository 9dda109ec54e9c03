"""Bounds on a ball and in the mean field hold against Jacobians and ascent, and can be broken."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lipformer.analysis import (
    AttentionMaps,
    adversarial_measure,
    adversarial_tokens,
    attention_maps,
    ball_bound,
    layer_norm_radius,
    mean_field_bound,
    measure_gain,
)
from lipformer.analysis.bounds.ball import combine_heads
from tests.analysis.jacobians import gains, in_ball, normal, one_head, random_groups, random_maps
from tests.functional.test_gain_attack import ascend


def test_no_jacobian_passes_a_bound() -> None:
    cases, closest = 0, 0.0
    for maps, n in random_groups(48):
        radius = 10 ** float(torch.rand(()) - 0.6)
        x = in_ball(radius * 1.5 * normal(8, n, maps.logits.shape[-1]), radius)
        x[0] = adversarial_tokens(maps, n, radius)
        gain = float(gains(maps, x).max())
        bound = ball_bound(maps, n, radius)
        assert gain <= bound <= ball_bound(maps, n, radius, any_mask=True)
        assert gain <= mean_field_bound(maps, radius)
        cases, closest = cases + 8, max(closest, gain / bound)
    assert cases >= 300
    assert closest > 0.5, "the attack is too weak to show anything"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_no_ascent_passes_a_bound(scale: float, heads: int, causal: bool) -> None:
    maps = random_maps(heads, 2, 2, bias=heads == 3, causal=causal, scale=scale)
    start = 1.5 * normal(6, 4, 2)
    start[0] = adversarial_tokens(maps, 4, 1.0)
    best, _ = ascend(start, lambda z: gains(maps, in_ball(z, 1.0)), steps=25)
    assert float(best.max()) <= ball_bound(maps, 4, 1.0)
    assert float(best.max()) <= mean_field_bound(maps, 1.0)


@pytest.mark.parametrize("n", [1, 2, 5, 100, 10_000])
@pytest.mark.parametrize("causal", [False, True])
def test_below_theorem_3_3_and_the_mean_field(n: int, causal: bool) -> None:
    for alpha in (0.0, 0.1, 1.0, 5.0, 300.0):
        bound = ball_bound(one_head(-alpha, 3), n, 1.0, causal=causal)
        assert bound <= math.sqrt(3 * (alpha**2 * (n + 1) + n)) * (1 + 1e-6)
        if not causal:
            assert bound <= mean_field_bound(one_head(-alpha, 3), 1.0) * (1 + 1e-6)
            plain = (1 + 3 * alpha) * math.exp(2 * alpha)
            assert mean_field_bound(one_head(-alpha, 3), 1.0) <= plain * (1 + 1e-6)
        else:
            notes = alpha + 2 * (1 + 2 * alpha) * math.exp(2 * alpha)
            assert mean_field_bound(one_head(-alpha, 3), 1.0, causal=True) <= notes * (1 + 1e-6)


def test_equality_without_logits() -> None:
    """Attention that averages has the gain ||W||, which the bounds are."""
    maps = AttentionMaps(torch.zeros(1, 3, 3, dtype=torch.float64), normal(1, 3, 4))
    gain = float(gains(maps, normal(1, 6, 3)))
    assert gain == pytest.approx(ball_bound(maps, 6, 2.0), rel=1e-6)
    assert gain == pytest.approx(mean_field_bound(maps, 2.0), rel=1e-6)


def test_running_means_approach_the_causal_mean_field() -> None:
    """Hardy's constant 2 is reached as n grows, and passes the bound of attention without mask."""
    maps = one_head(0.0, causal=True)
    bound = mean_field_bound(maps, 1.0)
    found = [float(gains(maps, torch.zeros(1, n, 1, dtype=torch.float64))) for n in (4, 64, 256)]
    assert bound == pytest.approx(2.0, rel=1e-6)
    assert found == sorted(found)
    assert 1.65 < found[-1] <= bound
    assert found[0] > ball_bound(maps, 256, 1.0, causal=False)  # the control
    assert found[0] <= ball_bound(maps, 4, 1.0)


def test_many_causal_tokens_stay_below_the_mean_field() -> None:
    for alpha in (0.3, 1.0, 2.0):
        maps = one_head(-alpha, causal=True)
        x = adversarial_tokens(maps, 200, 1.0)
        assert float(gains(maps, x[None])) <= min(
            mean_field_bound(maps, 1.0), ball_bound(maps, 200, 1.0)
        )


def test_each_term_is_needed() -> None:
    """Negative controls: without a factor, an input passes the formula."""
    alpha, n = 2.0, 34
    gain = float(gains(one_head(-alpha), adversarial_tokens(one_head(-alpha), n, 1.0)[None]))
    column = n / (1 + (n - 1) * math.exp(-2 * alpha))
    assert gain <= (1 + alpha) * math.sqrt(column) + alpha
    assert gain > math.sqrt(column) + alpha, "without the third term"
    assert gain > math.sqrt(alpha**2 + n), "Theorem 3.3 with 1 in place of n + 1"
    gain = float(measure_gain(one_head(-5.0), *adversarial_measure(one_head(-5.0), 1.0)))
    assert gain <= mean_field_bound(one_head(-5.0), 1.0)
    assert gain > 5.0 + 6.0 * math.exp(2.5), "with logits in half the range"
    assert gain > 5.0 + math.exp(5.0), "without the third term"
    # Theorem 3.3 with (n + 1) needs its sqrt(3): orthogonal query and key directions, two tokens.
    cross = torch.tensor([[[0.0, 4.0], [4.0, 0.0]]], dtype=torch.float64)
    maps = AttentionMaps(cross, torch.eye(2, dtype=torch.float64)[None])
    x = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]], dtype=torch.float64)
    gain = float(gains(maps, x))
    assert gain == pytest.approx(8.0, rel=1e-6)
    assert math.sqrt(4.0**2 * 3 + 2) < gain <= ball_bound(maps, 2, 1.0)


def test_the_query_bias_counts() -> None:
    offset = torch.tensor([[4.0]], dtype=torch.float64)
    maps = AttentionMaps(torch.zeros(1, 1, 1, dtype=torch.float64), one_head(1.0).values, offset)
    x = adversarial_tokens(maps, 30, 1.0)
    gain = float(gains(maps, x[None]))
    assert gain <= ball_bound(maps, 30, 1.0)
    without = AttentionMaps(maps.logits, maps.values)
    assert gain > 2 * ball_bound(without, 30, 1.0)


def test_heads_combine() -> None:
    for heads in (2, 3, 4):
        values, lipschitz = normal(heads, 3, 5), torch.rand(6, heads, dtype=torch.float64)
        lipschitz[0, 0] = 0.0
        combined = combine_heads(lipschitz, values)
        norms = torch.linalg.matrix_norm(values, ord=2)
        assert (combined <= (lipschitz * norms).sum(-1) * (1 + 1e-6)).all()
        joint = torch.linalg.matrix_norm(values.flatten(0, 1), ord=2)
        assert (combined <= joint * torch.linalg.vector_norm(lipschitz, dim=-1) * (1 + 1e-6)).all()
        # Heads that are the same but for a factor and one output direction reach it.
        reached = torch.linalg.matrix_norm(torch.einsum("bh,hde->bde", lipschitz, values), ord=2)
        assert (reached <= combined).all()
    same = torch.ones(3, 2, 2, dtype=torch.float64)
    assert combine_heads(torch.ones(3, dtype=torch.float64), same).item() == pytest.approx(6.0, rel=1e-6)
    # The control: the largest head in place of the root of the sum of squares.
    assert torch.linalg.matrix_norm(same.flatten(0, 1), ord=2).item() < 6.0 - 1.0


def test_layers_of_torch_and_radius_zero() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True).requires_grad_(False)
    bound = ball_bound(layer, 5, layer_norm_radius(8))
    x = nn.functional.layer_norm(torch.randn(4, 5, 8), (8,)).double()
    gain = float(gains(attention_maps(layer), x).max())
    assert gain <= bound < ball_bound(layer, 5, 2 * layer_norm_radius(8))
    maps = attention_maps(layer)
    origin = float(torch.linalg.matrix_norm(maps.values.sum(0), ord=2))
    assert origin <= ball_bound(layer, 5, 0.0)
    assert math.isinf(mean_field_bound(one_head(-1.0), 1e3))


def test_layer_norm_radius() -> None:
    assert layer_norm_radius(16) == pytest.approx(4.0, rel=1e-9)
    norm = nn.LayerNorm(16)
    with torch.no_grad():
        norm.weight.uniform_(-2, 2)
        norm.bias.normal_()
    tokens = norm(torch.randn(2000, 16).exp()).detach().norm(dim=-1)
    assert float(tokens.max()) <= layer_norm_radius(norm)
    assert float(tokens.max()) > 4.0  # the control: without the affine part
    assert layer_norm_radius(nn.RMSNorm(9)) == pytest.approx(3.0, rel=1e-9)
    assert layer_norm_radius(nn.LayerNorm(9, elementwise_affine=False)) == layer_norm_radius(9)
