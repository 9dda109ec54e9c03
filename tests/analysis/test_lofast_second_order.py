"""The second way of LoFAST's bound: the Jacobian at the input and the remainder."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.func import jacrev, jvp

from lipformer.analysis import lofast_bound
from lipformer.analysis.robustness import lofast as _lofast
from lipformer.analysis.robustness import lofast_terms as terms
from recipes.analysis.lofast import attack
from tests.analysis.test_lofast import F64, random_layer, random_mask


def case(seed: int, size: float = 1.0) -> tuple:
    """A layer, a batch of three inputs and a mask."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    heads, tokens, dim = rng.randint(1, 4), rng.randint(1, 12), rng.randint(1, 12)
    maps = random_layer(rng, heads, dim, dim, size)
    return maps, torch.randn(3, tokens, dim, dtype=F64), random_mask(rng, 3, tokens)


@pytest.mark.parametrize("seed", range(8))
def test_for_a_small_step_the_bound_is_the_norm_of_the_jacobian(seed: int) -> None:
    maps, x, mask = case(seed)
    eps, (r, s) = 1e-9, [(0.0, 1.0), (1.0, -0.7)][seed % 2]
    got = lofast_bound(maps, x, eps, residual=r, scale=s, mask=mask) / eps
    for i, token in enumerate(x):
        own = None if mask is None else mask[i]
        whole = jacrev(lambda y, m=own: r * y + s * maps(y, m))(token)
        want = torch.linalg.matrix_norm(whole.flatten(2).flatten(0, 1), 2)
        torch.testing.assert_close(got[i], want, rtol=1e-6, atol=1e-9)
        assert got[i] >= want


def remainders(seed: int, monkeypatch: pytest.MonkeyPatch, radius: float) -> tuple[Tensor, Tensor]:
    """What an attack on f(x + e) - f(x) - Df(x) e finds, and its bound."""
    maps, x, mask = case(seed)
    seen = []
    term = _lofast.remainder_term

    def spied(*args: Tensor) -> Tensor:
        seen.append(term(*args))
        return seen[-1]

    monkeypatch.setattr(_lofast, "remainder_term", spied)
    eps = torch.full((3,), radius, dtype=F64)
    lofast_bound(maps, x, eps, mask=mask)

    def left(y: Tensor) -> Tensor:
        change, base = y - x, x.detach()
        return maps(y, mask) - jvp(lambda z: maps(z, mask), (base,), (change,))[1]

    return attack(left, x, eps, steps=20), seen[0]


@pytest.mark.parametrize("radius", [0.02, 0.3, 2.0])
def test_no_attack_passes_the_remainder(monkeypatch: pytest.MonkeyPatch, radius: float) -> None:
    ratios = []
    for seed in range(12):
        found, bound = remainders(seed, monkeypatch, radius)
        # Rounding of the attack itself, where the remainder is none.
        assert bool((found <= bound + 1e-12).all())
        ratios += (found / bound.clamp_min(1e-12)).tolist()
    if radius < 0.1:
        # Of the same order: no vacuous bound.
        assert max(ratios) > 0.2


def test_it_is_used_for_small_inputs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    maps, x, _ = case(3)
    small = lofast_bound(maps, x, 0.05)
    monkeypatch.setattr(_lofast, "EXACT", 0)
    monkeypatch.setattr(terms, "EXACT", 0)
    assert bool((small < 0.95 * lofast_bound(maps, x, 0.05)).all())


def test_tokens_that_overflow_leave_a_bound_without_nan() -> None:
    maps, x, _ = case(5)
    assert not lofast_bound(maps, x * 1e100, 0.1).isnan().any()
