"""LoFAST's bound against projected gradient ascent on finite perturbations."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from torch import Tensor, nn

from lipformer.analysis import AttentionMaps, lofast_bound
from lipformer.analysis.robustness import lofast_terms as terms
from recipes.analysis.lofast import attack, random_maps, random_tokens

F64 = torch.float64


def random_layer(rng: random.Random, heads: int, dim: int, out: int, size: float) -> AttentionMaps:
    """Low-rank logits and values, with or without offsets and the causal mask."""
    rank = max(1, dim // heads)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=F64) * size / math.sqrt(dim)

    return AttentionMaps.from_projections(
        draw(heads, dim, rank),
        draw(heads, dim, rank),
        draw(heads, dim, rank),
        draw(heads, rank, out),
        scale=rng.choice([1.0, rank**-0.5]),
        query_bias=torch.randn(heads, rank, dtype=F64) if rng.random() < 0.5 else None,
        out_bias=torch.randn(out, dtype=F64),
        causal=rng.random() < 0.3,
    )


def random_mask(rng: random.Random, batch: int, tokens: int) -> Tensor | None:
    """None, or random masks in which each token sees itself."""
    if rng.random() < 0.6:
        return None
    return (torch.rand(batch, 1, tokens, tokens) < 0.5) | torch.eye(tokens, dtype=torch.bool)


def attack_cases(seed: int, layers: int, batch: int, steps: int) -> list[float]:
    """attack / bound of random layers, each with a batch of inputs and radii of 0.01..3."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    ratios: list[float] = []
    for _ in range(layers):
        heads, tokens, dim = rng.randint(1, 4), rng.randint(1, 16), rng.randint(1, 16)
        residual, scale = rng.choice([(0.0, 1.0), (1.0, 1.0), (0.5, 0.5), (1.0, -1.0)])
        out = dim if residual else rng.randint(1, 16)
        maps = random_layer(rng, heads, dim, out, size=rng.choice([0.3, 1.0, 2.0]))
        mask = random_mask(rng, batch, tokens)
        x = torch.randn(batch, tokens, dim, dtype=F64) * rng.choice([0.3, 1.0, 2.0])
        eps = torch.exp(torch.empty(batch, dtype=F64).uniform_(math.log(0.01), math.log(3.0)))

        def layer(y: Tensor, parts: tuple = (maps, mask, residual, scale)) -> Tensor:
            maps, mask, residual, scale = parts
            return (residual * y if residual else 0.0) + scale * maps(y, mask)

        found = attack(layer, x, eps, steps=steps)
        bounds = [
            lofast_bound(maps, x, eps, residual=residual, scale=scale, mask=mask, refined=refined)
            for refined in (True, False)
        ]
        assert bool((bounds[0] <= bounds[1]).all()), "the refined bound is above the plain one"
        ratios += (found / bounds[0]).tolist()
    return ratios


@pytest.mark.parametrize("size", [0, terms.EXACT], ids=["formulas", "whole matrix"])
def test_no_attack_passes_the_bound(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Both ways to bound xi and eta: that of large inputs, and that of small ones."""
    monkeypatch.setattr(terms, "EXACT", size)
    ratios = attack_cases(seed=size, layers=64, batch=5, steps=15)
    assert len(ratios) == 320
    assert max(ratios) <= 1.0
    # The attack is one: it comes close somewhere.
    assert max(ratios) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, terms.EXACT], ids=["formulas", "whole matrix"])
def test_no_attack_passes_the_bound_in_a_larger_sweep(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(terms, "EXACT", size)
    assert max(attack_cases(seed=1 + size, layers=200, batch=8, steps=25)) <= 1.0


@pytest.mark.parametrize(
    ("kind", "inputs", "least"),
    [("generic", "generic", 0.5), ("unit-norm", "generic", 0.8), ("unit-norm", "unit-norm", 0.9)],
)
def test_the_refined_bound_is_tight(kind: str, inputs: str, least: float) -> None:
    """Median attack / bound; eps log-uniform in 0.01..3, N and D to 16, residual 0, 1 and 1/2."""
    rng = random.Random(2)
    torch.manual_seed(0)
    ratios = []
    for _ in range(30):
        heads = rng.choice([1, 2, 4])
        dim, tokens = heads * rng.randint(2, 16 // heads), rng.randint(2, 16)
        residual, scale = rng.choice([(0.0, 1.0), (1.0, 1.0), (0.5, 0.5)])
        maps, x = random_maps(kind, dim, heads), random_tokens(inputs, 4, tokens, dim)
        eps = torch.exp(torch.empty(4, dtype=F64).uniform_(math.log(0.01), math.log(3.0)))
        found = attack(lambda y, m=maps, r=residual, s=scale: r * y + s * m(y), x, eps, steps=25)
        ratios.append(found / lofast_bound(maps, x, eps, residual=residual, scale=scale))
    assert torch.cat(ratios).median() >= least
    assert torch.cat(ratios).max() <= 1.0


def test_it_grows_with_eps_and_is_zero_at_zero() -> None:
    maps = random_maps("generic", 8, 2)
    x = torch.randn(1, 6, 8, dtype=F64) * torch.tensor([0.1, 1.0, 5.0], dtype=F64)[:, None, None]
    for refined in (True, False):
        levels = [0.0, 1e-12, 1e-6, *torch.logspace(-4, 4, 200).tolist()]
        values = torch.stack([lofast_bound(maps, x, e, residual=0.5, refined=refined) for e in levels])
        assert values[0].tolist() == [0.0, 0.0, 0.0]
        assert bool((values[1:] >= values[:-1] * (1 - 1e-12)).all())


def test_samples_do_not_depend_on_each_other_and_shapes_follow() -> None:
    maps = random_maps("generic", 8, 2)
    x = torch.randn(2, 3, 5, 8, dtype=F64)
    eps = torch.rand(2, 3, dtype=F64)
    whole = lofast_bound(maps, x, eps)
    assert whole.shape == (2, 3)
    one = lofast_bound(maps, x[1, 2], eps[1, 2].item())
    assert one.shape == ()
    torch.testing.assert_close(one, whole[1, 2], rtol=1e-10, atol=0.0)
    assert lofast_bound(maps, x.float(), 0.1).dtype == torch.float32
    assert bool(
        (lofast_bound(maps, x.float(), 0.1) >= lofast_bound(maps, x.float().double(), 0.1)).all()
    )


def test_a_float32_layer_is_bounded_by_its_stored_weights() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(3, 5, 8)
    exact = lofast_bound(copy.deepcopy(layer).double(), x.double(), 0.2)
    torch.testing.assert_close(lofast_bound(layer, x.double(), 0.2), exact, rtol=0.0, atol=0.0)
    assert layer.in_proj_weight.dtype == torch.float32


@pytest.mark.parametrize("size", [0, 10**6], ids=["formulas", "whole matrix"])
def test_the_norms_of_maps_are_bounded_from_above(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """xi and eta against the singular values of their matrices; both paths."""
    monkeypatch.setattr(terms, "EXACT", size)
    for _ in range(60):
        h, n, d = (int(torch.randint(1, 5, ())) for _ in range(3))
        weights = torch.randn(h, n, n, dtype=F64).mul(3).softmax(-1)
        values, keys, queries = (torch.randn(h, *s, dtype=F64) for s in ((d, d), (n, d), (n, d)))
        keys = keys - keys.mean(-2, keepdim=True)
        residual, scale = float(torch.randn(())), float(torch.randn(()))

        def mix(
            e: Tensor, w: Tensor = weights, v: Tensor = values, r: float = residual, s: float = scale
        ) -> Tensor:
            return r * e + s * (w @ e @ v).sum(0)

        def move(e: Tensor, z: Tensor = keys, u: Tensor = queries) -> Tensor:
            logits = e @ z.mT + u @ e.mT
            return logits - logits.mean(-1, keepdim=True)

        start = torch.zeros(n, d, dtype=F64)
        for function, bound in (
            (mix, terms.mixing_norm(weights, values, residual, scale)),
            (move, terms.logit_norm(keys, queries)),
        ):
            jacobian = torch.autograd.functional.jacobian(function, start).reshape(-1, n * d)
            exact = torch.linalg.matrix_norm(jacobian, 2)
            assert bound >= exact * (1 - 1e-12)
            if size:
                torch.testing.assert_close(bound, exact, rtol=1e-6, atol=1e-6)


def test_the_false_pairing_in_xi_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 heads, N = D = 16, X = I, W_l = e_1 e_l^T: with W^T W beside P P^T it is below the norm.

    In head h every fourth token sees the first one alone, and all others see themselves.
    """
    n, h = 16, 4
    values = torch.zeros(h, n, n, dtype=F64)
    logits = 40.0 * torch.eye(n, dtype=F64).repeat(h, 1, 1)
    for head in range(h):
        values[head, 0, head] = 1.0
        logits[head, head::h, 0] = 80.0
    p = AttentionMaps(logits, values).weights(torch.eye(n, dtype=F64))
    exact = torch.linalg.matrix_norm(torch.einsum("hij,hde->iejd", p, values).reshape(n * n, n * n), 2)
    false = torch.sqrt(
        torch.linalg.matrix_norm((p @ p.mT).sum(0), 2)
        * torch.linalg.matrix_norm((values.mT @ values).sum(0), 2)
    )
    assert exact.item() == pytest.approx(4.36, abs=0.01)
    assert false.item() == pytest.approx(3.09, abs=0.01)
    monkeypatch.setattr(terms, "EXACT", 0)
    assert terms.mixing_norm(p, values, 0.0, 1.0) >= exact * (1 - 1e-12)


def test_row_norms_bound_each_row() -> None:
    for _ in range(40):
        keys, queries = torch.randn(2, 5, 3, dtype=F64)
        keys = keys - keys.mean(0)
        bounds = terms.row_norms(keys, queries, torch.linalg.matrix_norm(keys, 2))
        for i in range(5):

            def row(e: Tensor, i: int = i, z: Tensor = keys, u: Tensor = queries) -> Tensor:
                logits = e[i] @ z.mT + u[i] @ e.mT
                return logits - logits.mean()

            jacobian = torch.autograd.functional.jacobian(row, torch.zeros(5, 3, dtype=F64))
            assert bounds[i] >= torch.linalg.matrix_norm(jacobian.reshape(5, 15), 2) * (1 - 1e-12)


def test_the_slope_and_the_cap_of_softmax_hold() -> None:
    """Random and far moves of random logits, some of them masked."""
    scores = torch.randn(4000, 6, dtype=F64) * torch.logspace(-1, 1.5, 4000, dtype=F64)[:, None]
    allowed = (torch.rand(4000, 6) < 0.7) | (torch.arange(6) == 0)
    move = torch.randn(4000, 6, dtype=F64) * torch.logspace(-3, 2, 4000, dtype=F64)[:, None].flip(0)
    before = scores.masked_fill(~allowed, -torch.inf)
    after = (scores + move).masked_fill(~allowed, -torch.inf)
    way = torch.linalg.vector_norm(after.softmax(-1) - before.softmax(-1), dim=-1)
    reach = torch.linalg.vector_norm(move, dim=-1)
    gaps = terms.logit_gaps(before)
    slope = terms.softmax_slope(gaps.abs().amin(-1), gaps.amax(-1), reach)
    assert bool((way <= slope * reach * (1 + 1e-9) + 1e-15).all())
    assert bool((way <= terms.row_caps(before.softmax(-1), allowed)).all())
    assert bool((slope <= 0.5).all())


def test_weights_that_round_to_one_may_still_move() -> None:
    """Logits 0 and -800: the weights are 1 and 0 in floats, and eps can turn them round."""
    maps = AttentionMaps(torch.eye(1, dtype=F64)[None], torch.eye(1, dtype=F64)[None])
    x = torch.tensor([[[40.0], [20.0]]], dtype=F64)
    eps = torch.tensor([45.0], dtype=F64)
    found = attack(maps, x, eps, steps=200, starts=8)
    assert found <= lofast_bound(maps, x, eps)
    assert lofast_bound(maps, x, 20.0) > 20.0
    gaps = terms.logit_gaps(torch.tensor([0.0, -800.0], dtype=F64))
    torch.testing.assert_close(gaps, torch.tensor([800.0, -800.0], dtype=F64))


def test_one_token_and_one_visible_token_have_no_softmax_to_move() -> None:
    maps = random_maps("generic", 4, 2)
    norm = torch.linalg.matrix_norm(maps.values.sum(0), 2)
    alone = lofast_bound(maps, torch.randn(3, 1, 4, dtype=F64), 0.5)
    torch.testing.assert_close(alone, 0.5 * norm.expand(3), rtol=1e-6, atol=0.0)
    itself = torch.eye(5, dtype=torch.bool)
    masked = lofast_bound(maps, torch.randn(3, 5, 4, dtype=F64), 0.5, mask=itself)
    torch.testing.assert_close(masked, 0.5 * norm.expand(3), rtol=1e-6, atol=0.0)


def test_tiny_bounds_do_not_round_to_zero_and_zero_stays_zero() -> None:
    eye = torch.eye(2)[None]
    x = torch.randn(3, 2)
    for refined in (True, False):
        assert float(lofast_bound(AttentionMaps(eye, eye), x, 1e-46, refined=refined)) >= 1e-46
        assert float(lofast_bound(AttentionMaps(eye, eye), x, 0.0, refined=refined)) == 0.0
        huge = AttentionMaps(1e200 * eye.double(), eye.double())
        assert float(lofast_bound(huge, 1e150 * x.double(), 0.0, refined=refined)) == 0.0
