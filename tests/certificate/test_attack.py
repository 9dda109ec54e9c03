"""attack_lipschitz reaches what theory says is there, stays below what it rules out, and breaks
every attention that has no constant."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from scipy.special import lambertw  # type: ignore[import-untyped]
from torch import Tensor, nn

from lipformer.estimates.attack import attack_lipschitz, steepest_point
from lipformer.estimates.estimate import estimate_lipschitz
from lipformer.estimates.jacobian_products import independent_calls
from lipformer.functional.norms import NORMS
from tests.oracles import (
    dense_jacobian,
    free_values_attention,
    gains,
    l2_attention_oracle,
    own_key_masked_attention,
    positive_sign_attention,
    tied_attention,
    unsquared_attention,
    unsquared_free_values_attention,
    untied_attention,
)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def w0(x: float) -> float:
    return float(lambertw(x).real)


def theorem_a(n: int) -> float:
    """N^(1/4) + 2 m + 2 sqrt(m) (N/2)^(1/4), no mask."""
    m = w0((n - 1) / math.e)
    return n**0.25 + 2 * m + 2 * math.sqrt(m) * (n / 2) ** 0.25


def theorem_b(n: int) -> float:
    """(2N)^(1/4) + 2 m + 2 sqrt(m) N^(1/4), causal."""
    m = w0((n - 1) / math.e)
    return (2 * n) ** 0.25 + 2 * m + 2 * math.sqrt(m) * n**0.25


def theorem_e(n: int) -> float:
    """1 + 2 W0((n-1) e^(-3/2)): what a token does to itself, and a lower limit in l2."""
    return 1 + 2 * w0((n - 1) * math.exp(-1.5))


def one_head(is_causal: bool, scale: float | None = None) -> Callable[[Tensor], Tensor]:
    """y (*, N, d) -> P(y) y."""
    return lambda y: l2_attention_oracle(y[..., None, :, :], is_causal, scale=scale).squeeze(-3)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("n", "d", "size"), [(5, 1, 1.0), (9, 3, 1e-2), (17, 4, 1e2)])
def test_reaches_the_known_extremes(n: int, d: int, size: float, is_causal: bool) -> None:
    """From an x0 of any size. Theorems D and E are exact, so both sides are tested."""
    fn, x0, low = one_head(is_causal), size * normal(n, d, seed=n), theorem_e(n)
    high = {
        "l2": theorem_b(n) if is_causal else theorem_a(n),
        "self": low * (1 + 1e-9),
        "token": (2 * low - 1) * (1 + 1e-9),
    }
    for norm, least in {"l2": low, "self": low, "token": 2 * low - 1}.items():
        attack = attack_lipschitz(fn, x0, norm=norm, steps=40, generator=seeded(0))
        assert 0.98 * least <= attack.value <= high[norm], norm


def test_the_temperature_does_not_matter() -> None:
    x0 = normal(9, 2, seed=0)
    values = [
        attack_lipschitz(one_head(False, scale), x0, steps=40, generator=seeded(0)).value
        for scale in (1e-2, 1.0, 50.0)
    ]
    assert max(values) <= 1.01 * min(values)


N, WIDTH, HEAD = 6, 4, 2
W, W_OTHER = normal(WIDTH, HEAD, seed=1), normal(WIDTH, HEAD, seed=2)
BROKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "untied": lambda x: untied_attention(x, W, W_OTHER),
    "no A_h": lambda x: free_values_attention(x, W),
    "own key masked": lambda x: own_key_masked_attention(x, W),
    "unsquared, no A_h": lambda x: unsquared_free_values_attention(x, W),
    "positive sign": lambda x: positive_sign_attention(x, W),
}


def spread_input(scale: float) -> Tensor:
    """Tokens apart by O(1) where W looks and by O(scale) where it does not."""
    x = normal(N, WIDTH, seed=3)
    seen = torch.linalg.qr(W).Q
    inside = x @ seen @ seen.T
    return inside + scale * (x - inside)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_attention_has_no_constant(name: str) -> None:
    """Negative controls: the gain goes up with the size of the input, past any certificate."""
    values = [
        attack_lipschitz(
            BROKEN[name], spread_input(scale), steps=10, restarts=8, generator=seeded(0)
        ).value
        for scale in (1.0, 10.0, 100.0, 1000.0)
    ]
    assert all(after > 3 * before for before, after in pairwise(values))
    widest = max(1.0, torch.linalg.matrix_norm(torch.cat([W, W_OTHER], 1), 2).item())
    assert values[3] > 10 * widest**2 * theorem_b(N)


@pytest.mark.parametrize(("fn", "name"), [(tied_attention, "tied"), (unsquared_attention, "exp")])
def test_sound_attention_keeps_below_its_constant(fn: Callable[..., Tensor], name: str) -> None:
    """The same search on the same inputs: so the growth above is due to the defects.

    The unsquared distance alone is no defect: with tied weights and values linear in the keys,
    sum_j P_ij |y_i - y_j| <= W0((n-1)/e) takes the place of the squared distances.
    """
    limit = torch.linalg.matrix_norm(W, 2).item() * theorem_a(N)
    for scale in (1.0, 10.0, 100.0, 1000.0):
        attack = attack_lipschitz(
            lambda x: fn(x, W), spread_input(scale), steps=10, restarts=8, generator=seeded(0)
        )
        assert 1 <= attack.value <= limit, name


@pytest.mark.parametrize("norm", NORMS)
def test_linear_map(norm: str) -> None:
    weight = normal(3, 3, seed=0)
    attack = attack_lipschitz(lambda x: x @ weight, normal(4, 3, seed=1), norm=norm, steps=3, restarts=4)
    exact = gains(dense_jacobian(lambda x: x @ weight, torch.zeros(4, 3).double()), 4, 3)[norm]
    assert attack.value == pytest.approx(exact, rel=1e-4)
    assert attack.value <= exact * (1 + 1e-9)


@pytest.mark.parametrize("norm", NORMS)
def test_the_value_is_the_local_gain_at_the_input(norm: str) -> None:
    fn, x0 = one_head(True), normal(5, 2, seed=5)
    attack = attack_lipschitz(fn, x0, norm=norm, steps=10, restarts=8, generator=seeded(0))
    dense = gains(dense_jacobian(fn, attack.input), 5, 2)[norm]
    assert dense * (1 - 1e-4) <= attack.value <= dense * (1 + 1e-9)
    assert attack.value >= estimate_lipschitz(fn, x0, norm=norm).value * (1 - 1e-4)
    assert attack.input.shape == attack.direction.shape == x0.shape
    assert len(attack.history) == 11
    assert list(attack.history) == sorted(attack.history)
    assert attack.norm == norm


def test_one_start_is_x0() -> None:
    attack = attack_lipschitz(one_head(False), normal(5, 2, seed=0), steps=5, restarts=1)
    assert attack.start == "x0"
    assert attack.history[-1] >= attack.history[0] > 0


def test_a_generator_makes_it_reproducible() -> None:
    x0 = normal(5, 2, seed=0)
    first, second = (
        attack_lipschitz(one_head(False), x0, steps=5, generator=seeded(1)) for _ in range(2)
    )
    assert first.value == second.value
    assert torch.equal(first.input, second.input)
    assert first.start == second.start


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8)])
def test_modules_masks_and_layouts(batch_first: bool, shape: tuple[int, ...]) -> None:
    """A tuple, a padding mask for one batch size, tokens first or second; nothing is changed."""
    layer = nn.MultiheadAttention(8, 2, batch_first=batch_first).double()
    n, batch = (5, 2) if batch_first or len(shape) == 2 else (2, 5)
    padded = torch.zeros(batch, n, dtype=torch.bool)
    padded[0, -1] = True
    mask = padded if len(shape) == 3 else padded[0]
    x0 = normal(*shape, seed=0)

    def fn(x: Tensor) -> Any:
        return layer(x, x, x, key_padding_mask=mask)

    attack = attack_lipschitz(fn, x0, steps=4, restarts=6, generator=seeded(0))
    jacobian = dense_jacobian(lambda x: fn(x)[0], attack.input)
    dense = torch.linalg.matrix_norm(jacobian, 2).item()
    assert dense * (1 - 1e-4) <= attack.value <= dense * (1 + 1e-9)
    assert layer.training
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_inputs_that_are_not_finite_are_passed_over() -> None:
    """exp overflows for the larger starts; the search goes on with the others."""
    attack = attack_lipschitz(lambda x: x.exp().exp(), torch.zeros(2, 2).double(), steps=10)
    assert math.isfinite(attack.value)
    assert attack.value > math.e
    assert bool(torch.isfinite(attack.input).all())


def test_independent_calls_are_single_calls() -> None:
    """By a batch, by vmap where the batch is misread, by a loop where neither will do."""
    x = normal(4, 3, 2, seed=0)

    def misread(x: Tensor) -> Tensor:
        return x - x.mean(dim=0)

    def stubborn(x: Tensor) -> Tensor:
        assert x.ndim == 2
        return misread(x) if x.sum().item() > 0 else 2 * misread(x)

    for fn in (one_head(False), misread, stubborn):
        many = independent_calls(fn, x)
        torch.testing.assert_close(many(x), torch.stack([fn(one) for one in x]))


def test_steepest_point_finds_a_jump() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.tanh(1e6 * (x - 0.3))

    a, b = torch.zeros(1, 1).double(), torch.ones(1, 1).double()
    assert steepest_point(fn, a, b, "l2").item() == pytest.approx(0.3, abs=1e-6)
