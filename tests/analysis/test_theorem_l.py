"""Theorem L, lemma by lemma: attacks on one head around structured inputs, under every mask."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from lipformer.analysis.robustness import theorem_l
from lipformer.analysis.robustness.theorem_l import (
    Terms,
    curvature,
    head_terms,
    jacobian_bound,
    local_gain,
    weight_caps,
)
from lipformer.functional import l2_gain

F64 = torch.float64
MASKS = ("none", "causal", "window", "alibi", "padding")


def bias_of(mask: str, n: int) -> Tensor | None:
    place = torch.arange(n)
    lag = (place[:, None] - place).to(F64)
    if mask == "none":
        return None
    if mask == "padding":  # the last two tokens are padded: hidden, and their own rows are zero
        padded = (place >= n - 2)[:, None] | (place >= n - 2)
        return torch.zeros(n, n, dtype=F64).masked_fill(padded, -torch.inf)
    bias = -0.25 * lag if mask == "alibi" else torch.zeros_like(lag)
    hidden = lag < 0 if mask != "window" else (lag < 0) | (lag >= 3)
    return bias.masked_fill(hidden, -torch.inf)


def inputs(n: int = 8, d: int = 3) -> Tensor:
    """Heads (K, N, d): random ones of several sizes, clusters, a star, equal tokens, a line."""
    torch.manual_seed(0)
    noise = torch.randn(4, n, d, dtype=F64)
    sign = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0).to(F64)[:, None]
    axis = torch.zeros(n, d, dtype=F64)
    axis[:, 0] = 1.0
    star = torch.cat([torch.zeros(1, d, dtype=F64), 0.9 * torch.nn.functional.normalize(noise[3, 1:])])
    return torch.stack(
        [
            0.3 * noise[0],
            noise[1],
            3.0 * noise[2],
            1e-4 * noise[3],
            0.8 * sign * axis + 0.05 * noise[0],
            star,
            torch.zeros(n, d, dtype=F64),
            torch.linspace(0.0, 4.0, n, dtype=F64)[:, None] * axis,
            1e5 + 0.5 * noise[1],
            30.0 * sign * axis + 0.5 * noise[2],
        ]
    )


def weights(z: Tensor, bias: Tensor | None) -> Tensor:
    scores = -(z[..., :, None, :] - z[..., None, :, :]).square().sum(-1)
    scores = scores if bias is None else scores + bias
    hidden = scores.isneginf().all(-1, keepdim=True)
    return scores.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)


def phi(z: Tensor, bias: Tensor | None = None) -> Tensor:
    return weights(z, bias) @ z


def ascend(objective: Callable[[Tensor], Tensor], e: Tensor, eta: Tensor, steps: int = 25) -> Tensor:
    """The largest of objective(e), (K,), over |e| = eta, by following gradients."""
    best = objective(e * (eta / e.norm(dim=(-2, -1)))[..., None, None]).detach()
    for _ in range(steps):
        e = (e * (eta / e.norm(dim=(-2, -1)).clamp_min(1e-300))[..., None, None]).requires_grad_()
        found = objective(e)
        best = torch.maximum(best, found.detach())
        slope = torch.autograd.grad(found.sum(), e)[0]
        lost = slope.norm(dim=(-2, -1)) == 0
        e = torch.where(lost[..., None, None], torch.randn_like(slope), slope)
    return best


def terms_of(mask: str, eta: float) -> tuple[Tensor, Tensor | None, Terms, Tensor]:
    z = inputs()
    z = z - z.mean(-2, keepdim=True)
    bias = bias_of(mask, z.shape[-2])
    return z, bias, head_terms(z, bias), torch.full((len(z),), eta, dtype=F64)


@pytest.mark.parametrize("mask", MASKS)
def test_no_weight_passes_its_cap(mask: str) -> None:
    closest, caught = 0.0, False
    for eta in (1e-3, 0.1, 1.0, 8.0):
        z, bias, terms, radius = terms_of(mask, eta)
        caps = weight_caps(terms, radius)
        # Negative control: A without the part of the other keys, a tenth lower.
        apart = terms.spreads.square() + (1 - terms.weights).square() * terms.distances.square()
        wrong = weight_caps(terms._replace(steepness=0.9 * apart.sqrt()), radius)
        for i, j in ((0, 0), (4, 1), (5, 5), (3, 7)):
            if not bool(terms.allowed[0, i, j]):
                continue

            def weight(e: Tensor, i: int = i, j: int = j) -> Tensor:
                return weights(z + e, bias)[:, i, j].clamp_min(1e-290).log()  # noqa: B023

            found = ascend(weight, torch.randn_like(z), radius).exp()
            assert bool((found <= caps[:, i, j] * (1 + 1e-9) + 1e-280).all()), (eta, i, j)
            caught = caught or bool((found > wrong[:, i, j] * (1 + 1e-6) + 1e-280).any())
            moved = found > 1.02 * terms.weights[:, i, j]
            closest = max(closest, *(found / caps[:, i, j])[moved].tolist(), 0.0)
    assert closest > 0.9  # nearly reached: caps 10% lower would be passed
    assert caught


def slope_along(z: Tensor, bias: Tensor | None, e: Tensor, h: float = 1e-4) -> Tensor:
    """D Phi[E] by differences."""
    return (phi(z + h * e, bias) - phi(z - h * e, bias)) / (2 * h)


def second_derivative(z: Tensor, bias: Tensor | None, rounds: int = 8) -> Tensor:
    """The largest |D^2 Phi[E, V]| found over unit E and V, by differences, (K,)."""
    h = 1e-3

    def bent(e: Tensor, v: Tensor) -> Tensor:
        ends = [phi(z + a * h * e + b * h * v, bias) * a * b for a in (1, -1) for b in (1, -1)]
        return sum(ends).norm(dim=(-2, -1)) / (4 * h * h)

    def unit(e: Tensor) -> Tensor:
        return (e / e.norm(dim=(-2, -1)).clamp_min(1e-30)[..., None, None]).detach()

    best = torch.zeros(len(z), dtype=F64)
    for start in range(3):
        e = unit(torch.randn_like(z))
        v = e if start else unit(torch.randn_like(z))
        for _ in range(rounds):
            for _ in range(2):  # linear in either
                v.requires_grad_()
                e, v = v.detach(), unit(torch.autograd.grad(bent(e, v).sum(), v)[0] + 1e-12)
            best = torch.maximum(best, bent(e, v))
    return best


@pytest.mark.parametrize("mask", MASKS)
def test_no_second_derivative_passes_the_curvature(mask: str) -> None:
    closest = 0.0
    for eta in (0.0, 0.05, 0.5):
        z, bias, terms, radius = terms_of(mask, eta)
        bound = curvature(terms, radius)
        step = torch.randn_like(z)
        step = eta * step / step.norm(dim=(-2, -1))[..., None, None]
        found = second_derivative(z + step, bias)
        assert bool((found <= bound * (1 + 1e-6)).all()), (found / bound).tolist()
        closest = max(closest, float((found / bound).max()))
    assert closest > 0.4  # 40% of it would be passed


@pytest.mark.parametrize("mask", MASKS)
def test_the_jacobian_is_within_its_bound(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    z, bias, terms, _ = terms_of(mask, 0.0)
    k, n, d = z.shape
    rows = [torch.autograd.functional.jacobian(lambda y: phi(y, bias), y) for y in z]
    jacobian = torch.stack(rows).reshape(k, n * d, n * d)
    exact = torch.linalg.matrix_norm(jacobian, 2)
    dense = jacobian_bound(terms)
    assert bool((exact <= dense * (1 + 1e-9)).all())
    assert bool((dense <= 1.021 * exact).all())
    monkeypatch.setattr(theorem_l, "DENSE", 0)
    other = jacobian_bound(terms)
    assert bool((exact <= other * (1 + 1e-9)).all())
    assert bool((other <= 3.5 * exact).all())
    assert (exact / other).max() > 0.95  # 5% lower would be passed


@pytest.mark.parametrize("mask", MASKS)
def test_no_step_and_no_remainder_passes(mask: str) -> None:
    steps, remainders = [], []
    for eta in (1e-3, 0.05, 0.3, 1.0):
        z, bias, terms, radius = terms_of(mask, eta)
        slope = jacobian_bound(terms)
        bound = local_gain(terms, slope, radius)
        at = phi(z, bias)
        found = ascend(lambda e: (phi(z + e, bias) - at).norm(dim=(-2, -1)), torch.randn_like(z), radius)  # noqa: B023
        assert bool((found <= eta * bound * (1 + 1e-7)).all()), (found / eta / bound).tolist()
        steps += (found / eta / bound).tolist()

        def remainder(e: Tensor) -> Tensor:
            return (phi(z + e, bias) - at - slope_along(z, bias, e / eta) * eta).norm(dim=(-2, -1))  # noqa: B023

        found = ascend(remainder, torch.randn_like(z), radius, steps=8)
        allowed = eta * (bound - slope)
        assert bool((found <= allowed * (1 + 1e-7) + 1e-9).all()), (found / allowed).tolist()
        remainders += (found / allowed)[found > 1e-8].tolist()
    assert max(steps) > 0.98  # 2% lower would be passed
    assert max(remainders) > 0.25  # a quarter would be passed


def test_it_is_the_global_gain_at_most_and_holds_for_shorter_steps() -> None:
    z, _, terms, _ = terms_of("none", 0.0)
    slope, gain = jacobian_bound(terms), l2_gain(z.shape[-2])
    radii = torch.logspace(-4, 4, 9, dtype=F64)
    found = torch.stack([local_gain(terms, slope, r.expand(len(z)), gain) for r in radii])
    assert bool((found <= gain).all())
    assert bool((found[1:] >= found[:-1] * (1 - 1e-9)).all())
    assert bool((found[0] <= 1.01 * slope + 1e-3).all())
    assert bool((found[-1] > 0.99 * gain).all())


# Bound over attacked truth at eta = .01, .1, .3, 1, 10% above what the second reading has.
RATIOS = {
    ("gauss", 16, 16): (1.07, 1.82, 3.5, 4.2),
    ("unit", 64, 16): (1.05, 1.53, 3.9, 8.8),
    ("gauss", 64, 64): (1.04, 1.09, 1.67, 8.2),
    ("unit", 197, 64): (1.15, 1.43, 3.0, 12.1),
}


@pytest.mark.parametrize(("kind", "n", "d"), RATIOS)
def test_the_ratios_of_the_table(kind: str, n: int, d: int) -> None:
    torch.manual_seed(0)
    z = torch.randn(1, n, d, dtype=F64)
    z = z / z.norm(dim=-1, keepdim=True) if kind == "unit" else z * d**-0.25
    terms = head_terms(z)
    slope, at = jacobian_bound(terms), phi(z)
    for eta, ratio in zip((0.01, 0.1, 0.3, 1.0), RATIOS[kind, n, d], strict=True):
        radius = torch.tensor([eta], dtype=F64)
        bound = local_gain(terms, slope, radius, l2_gain(n))
        steps = 3 if n > 64 else 15
        found = ascend(
            lambda e: (phi(z + e) - at).norm(dim=(-2, -1)), torch.randn_like(z), radius, steps
        )
        assert 1.0 <= float(bound * eta / found) <= 1.1 * ratio, eta
        assert float(bound) < 0.96 * l2_gain(n)  # not the global one


def long_weights(z: Tensor, bias: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """The weights and their logarithms in long double, with 11 more bits than float64."""
    y = z.numpy().astype(np.longdouble)
    scores = -np.square(y[..., :, None, :] - y[..., None, :, :]).sum(-1)
    if bias is not None:
        scores = scores + bias.numpy().astype(np.longdouble)
    scores = scores - scores.max(-1, keepdims=True)
    logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return np.exp(logs), logs


@pytest.mark.skipif(np.finfo(np.longdouble).nmant <= 52, reason="long double is float64 here")
@pytest.mark.parametrize("mask", ["none", "alibi"])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e3, 1e6])
def test_rounding_stays_within_its_margins(mask: str, scale: float) -> None:
    z = scale * inputs(24, 5)[:8]
    z = z - z.mean(-2, keepdim=True)
    bias = bias_of(mask, z.shape[-2])
    terms = head_terms(z, bias)
    exact, logs = long_weights(z, bias)
    allowed = terms.allowed.numpy()
    known = terms.weights.log().numpy()
    seen = allowed & (known > -700)
    off, doubt = np.abs(logs[seen] - known[seen]), terms.doubt.numpy()[seen]
    assert (off <= doubt).all()
    assert (off > 1e-4 * doubt).any()  # margins 10,000 times smaller would be passed
    caps = weight_caps(terms, torch.zeros(len(z), dtype=F64)).numpy()
    assert (exact.astype(np.float64) <= caps)[allowed].all()
    means = exact @ z.numpy().astype(np.longdouble)
    drift = np.linalg.norm((means - terms.centres.numpy()).astype(np.float64), axis=-1)
    weights_off = np.einsum("kij,kij->ki", (caps - terms.weights.numpy()), terms.spreads.numpy())
    assert (drift <= terms.drift.numpy() + weights_off).all()


def test_weights_that_underflow_may_still_move() -> None:
    z = torch.zeros(1, 3, 2, dtype=F64)
    z[0, 1, 0], z[0, 2, 0] = 40.0, -40.0
    terms = head_terms(z)
    assert terms.weights[0, 0, 1] == 0.0
    e = torch.zeros_like(z)
    e[0, 1, 0] = -39.0
    moved = weights(z + e, None)[0, 0, 1]
    assert moved > 0.2
    assert moved <= weight_caps(terms, torch.tensor([39.0], dtype=F64))[0, 0, 1]


@pytest.mark.parametrize("size", [1e-200, 1e-30, 1e30, 1e200])
def test_extreme_sizes_give_a_bound(size: float) -> None:
    z = size * torch.randn(2, 5, 3, dtype=F64)
    terms = head_terms(z)
    gain = l2_gain(5)
    for eta in (1e-250, 1e-3, 1e3, 1e250):
        found = local_gain(terms, jacobian_bound(terms), torch.full((2,), eta, dtype=F64), gain)
        assert bool(((found >= 1.0) & (found <= gain)).all())
    assert math.isfinite(gain)
