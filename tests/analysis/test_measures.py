"""Attention on measures: it sees the measure alone, and its W2 gains are reached by moves and splits."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

import lipformer as lf
from lipformer.analysis import (
    AttentionMaps,
    attention_maps,
    measure_attention,
    measure_gain,
    measure_gain_estimate,
    measures,
    split_attack,
    split_gain,
)
from tests.analysis.jacobians import gains, normal, one_head, random_maps

Attention = AttentionMaps | nn.Module


def l2_layer(value_proj: bool, dim: int = 4, heads: int = 2) -> lf.L2MultiheadAttention:
    layer = lf.L2MultiheadAttention(
        dim, heads, batch_first=True, value_proj=value_proj, dtype=torch.float64
    )
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer.requires_grad_(False).eval()


def dot_layer(dim: int = 4, heads: int = 2) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(dim, heads, batch_first=True, dtype=torch.float64)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer.requires_grad_(False).eval()


LAYERS = {
    "maps": lambda: random_maps(2, 4, 3, bias=True),
    "torch": dot_layer,
    "l2 lean": lambda: l2_layer(False),
    "l2 paper": lambda: l2_layer(True),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def random_weights(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) + 0.05


def wasserstein(x: Tensor, a: Tensor, y: Tensor, b: Tensor) -> float:
    """W2 of two clouds by linear programming."""
    cost = (x[:, None] - y).square().sum(-1)
    n, m = cost.shape
    rows = torch.eye(n).repeat_interleave(m, 1)
    columns = torch.eye(m).repeat(1, n)
    # In units of the largest cost, for the solver's absolute tolerances.
    unit = float(cost.max())
    result = linprog(
        (cost / unit).flatten().numpy(),
        A_eq=torch.cat([rows, columns])[:-1].numpy(),
        b_eq=torch.cat([a, b])[:-1].numpy(),
        options={"dual_feasibility_tolerance": 1e-10, "primal_feasibility_tolerance": 1e-10},
    )
    assert result.success, result.message
    return math.sqrt(result.fun * unit)


@every_layer
def test_equal_weights_are_the_layer(name: str) -> None:
    layer, x = LAYERS[name](), normal(3, 5, 4)
    expected = layer(x) if isinstance(layer, AttentionMaps) else layer(x, x, x)[0]
    torch.testing.assert_close(measure_attention(layer, x, torch.ones(5)), expected)
    torch.testing.assert_close(measure_attention(layer, x, torch.full((3, 5), 7.0)), expected)


@every_layer
def test_a_doubled_token_of_half_the_weight_changes_nothing(name: str) -> None:
    layer = LAYERS[name]()
    for _ in range(20):
        x, a = normal(5, 4), random_weights(5)
        k = int(torch.randint(5, ()))
        doubled, halved = torch.cat([x, x[k, None]]), torch.cat([a, a[k, None] / 2])
        halved[k] /= 2
        image, split = measure_attention(layer, x, a), measure_attention(layer, doubled, halved)
        torch.testing.assert_close(split[:5], image)
        torch.testing.assert_close(split[5], image[k])
        gain, after = split_gain(layer, x, a), split_gain(layer, doubled, halved)
        torch.testing.assert_close(after, gain)
        # The control: without halving, it is another measure.
        other = measure_attention(layer, doubled, torch.cat([a, a[k, None]]))
        assert (other[:5] - image).abs().max() > 1e-9


def test_three_tokens() -> None:
    """The case of the notes: 2.398 without, 2.667 with splitting."""
    x, a = torch.tensor([[2.0], [-2.0], [0.0]], dtype=torch.float64), torch.ones(3)
    assert float(measure_gain(one_head(-1.0), x, a)) == pytest.approx(2.398, abs=5e-4)
    assert float(split_gain(one_head(-1.0), x, a)) == pytest.approx(8 / 3, rel=1e-12)
    attack = split_attack(one_head(-1.0), x, a, step=1e-4)
    assert attack.token == 2
    assert attack.gain == pytest.approx(8 / 3, rel=1e-12)
    assert attack.ratio == pytest.approx(8 / 3, rel=1e-6)


@every_layer
def test_equal_weights_have_the_plain_gain(name: str) -> None:
    layer, x = LAYERS[name](), normal(2, 4, 4)
    plain = gains(lambda y: measure_attention(layer, y, torch.ones(4)), x)
    torch.testing.assert_close(measure_gain(layer, x, torch.ones(4)), plain)
    if isinstance(layer, AttentionMaps | nn.MultiheadAttention):
        torch.testing.assert_close(plain, gains(attention_maps(layer), x))


@every_layer
def test_batches_and_the_estimate(name: str) -> None:
    layer, x, a = LAYERS[name](), normal(2, 2, 5, 4), random_weights(2, 2, 5)
    batch = measure_gain(layer, x, a)
    assert batch.shape == split_gain(layer, x, a).shape == (2, 2)
    torch.testing.assert_close(measure_gain(layer, x[1, 0], 9 * a[1, 0]), batch[1, 0])
    estimate = measure_gain_estimate(layer, x[1, 0], a[1, 0], generator=torch.Generator().manual_seed(0))
    assert estimate.value == pytest.approx(float(batch[1, 0]), rel=1e-5)
    assert estimate.value <= float(batch[1, 0]) * (1 + 1e-9)


@every_layer
def test_finite_moves_reach_the_gain_in_w2(name: str) -> None:
    """Along the top direction W2 grows by the gain, measured by linear programming."""
    layer, x, a = LAYERS[name](), normal(4, 4), random_weights(4)
    a = a / a.sum()
    estimate = measure_gain_estimate(layer, x, a, generator=torch.Generator().manual_seed(0))
    moved = x + 1e-4 * estimate.direction / a.sqrt()[:, None]
    images = [measure_attention(layer, y, a) for y in (x, moved)]
    ratio = wasserstein(images[0], a, images[1], a) / wasserstein(x, a, moved, a)
    assert ratio == pytest.approx(float(measure_gain(layer, x, a)), rel=1e-2)


@every_layer
def test_finite_splits_reach_the_gain_in_w2(name: str) -> None:
    layer, x, a = LAYERS[name](), normal(4, 4), random_weights(4)
    a = a / a.sum()
    attack = split_attack(layer, x, a, step=1e-4)
    assert attack.ratio == pytest.approx(attack.gain, rel=1e-2)
    k, move = attack.token, attack.step * attack.direction
    moved = torch.cat([x[:k], x[k : k + 1] + move, x[k + 1 :], x[k : k + 1] - move])
    halved = torch.cat([a, a[k, None] / 2])
    halved[k] /= 2
    before, after = measure_attention(layer, x, a), measure_attention(layer, moved, halved)
    ratio = wasserstein(before, a, after, halved) / wasserstein(x, a, moved, halved)
    assert ratio == pytest.approx(attack.ratio, rel=1e-3)
    assert attack.ratio <= ratio * (1 + 1e-6)


def test_query_jacobians_are_covariances() -> None:
    """sum_h A_h C_i W_h for dot products, sum_h 2 t_h W_h C_i M_h for L2 attention."""
    x, a = normal(5, 4), random_weights(5)
    maps = random_maps(3, 4, 2, bias=True)
    scores = (x @ maps.logits + maps.offset[:, None]) @ x.mT + a.log()
    centred, weights = _centred(scores, x.expand(3, 5, 4))
    expected = torch.einsum(
        "hde,hij,hije,hijf,hfo->iod", maps.logits, weights, centred, centred, maps.values
    )
    torch.testing.assert_close(measures._query_jacobians(maps, x, a), expected)

    layer = l2_layer(False)
    heads = layer.q_proj.weight.reshape(2, 2, 4).mT
    y = x @ heads
    scores = -layer.temperature * torch.cdist(y, y).square() + a.log()
    centred, weights = _centred(scores, y)
    scaled = 2 * layer.temperature * heads
    expected = torch.einsum(
        "hde,hij,hije,hijf,hfo->iod", scaled, weights, centred, centred, layer.output_matrix()
    )
    torch.testing.assert_close(measures._query_jacobians(layer, x, a), expected)


def _centred(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    weights = scores.softmax(-1)
    return y[:, None] - (weights @ y)[:, :, None], weights


def test_random_moves_with_copies_never_pass_the_split_gain() -> None:
    """Any copies of any tokens, moved in any way: the doubled cloud has the gain of the formula."""
    reached = []
    for k in range(60):
        heads, n, dim = 1 + k % 4, 2 + k % 4, 1 + k % 3
        maps, x, a = (
            random_maps(heads, dim, dim, bias=k % 2 == 0, scale=2.0),
            normal(n, dim),
            random_weights(n),
        )
        bound = float(split_gain(maps, x, a))
        cuts = 0.1 + 0.8 * torch.rand(n, dtype=torch.float64)
        doubled = float(measure_gain(maps, torch.cat([x, x]), torch.cat([a * cuts, a * (1 - cuts)])))
        # Two copies of every token suffice, so that this is the split gain itself.
        assert doubled == pytest.approx(bound, rel=1e-9)
        reached.append(bound / float(measure_gain(maps, x, a)))
    assert max(reached) > 1.02, "splitting must matter somewhere"
    assert min(reached) >= 1 - 1e-12


def test_a_wide_step_reports_what_it_reaches() -> None:
    x, a = torch.tensor([[2.0], [-2.0], [0.0]], dtype=torch.float64), torch.ones(3)
    ratios = [split_attack(one_head(-1.0), x, a, step=step).ratio for step in (1e-3, 0.5, 5.0)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] < 1.5


def test_single_precision_and_gradients() -> None:
    layer = lf.L2MultiheadAttention(4, 2, value_proj=False)
    x = torch.randn(5, 4, requires_grad=True)
    image = measure_attention(layer, x, torch.ones(5))
    assert image.dtype == torch.float32
    image.sum().backward()
    assert layer.q_proj.weight.grad is not None
    assert x.grad is not None
    assert measure_gain(layer, x, torch.ones(5)).dtype == torch.float64


@every_layer
@pytest.mark.parametrize("size", [1e-60, 1e300])
def test_only_ratios_of_weights_matter_whatever_their_size(name: str, size: float) -> None:
    layer, x, weights = LAYERS[name](), torch.randn(5, 4), random_weights(5)
    scaled = size * weights
    torch.testing.assert_close(
        split_gain(layer, x, scaled), split_gain(layer, x, weights), rtol=1e-9, atol=0
    )
    x = x.double()
    torch.testing.assert_close(
        measure_attention(layer, x, scaled), measure_attention(layer, x, weights), rtol=1e-9, atol=0
    )


def test_weights_keep_their_digits_beside_narrow_tokens() -> None:
    weights = torch.tensor([1.0, 1.003, 7.777])  # bfloat16 has 1.0, 1.0 and 7.78
    x = torch.tensor([[2.0], [-2.0], [0.0]])
    narrow, wide = (split_gain(one_head(-1.0), tokens, weights) for tokens in (x.bfloat16(), x))
    assert float(narrow) == float(wide)


@pytest.mark.parametrize("rare", [1.0, 1e-6])
def test_the_ratio_of_the_least_step_is_no_rounding_error(rare: float) -> None:
    for _ in range(20):
        maps, x = random_maps(2, 3, 3), normal(4, 3)
        weights = torch.tensor([1.0, rare, 1.0, rare], dtype=torch.float64)
        with pytest.raises(ValueError, match=r"step must be at least .* got 1e-16") as caught:
            split_attack(maps, x, weights, step=1e-16)
        least = float(str(caught.value).split()[5])
        attack = split_attack(maps, x, weights, step=1.1 * least)
        # The gain at the cloud, and what the gain may grow by within so small a step.
        assert attack.ratio <= float(split_gain(maps, x, weights)) * (1 + 1e-5)
