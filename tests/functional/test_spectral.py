"""spectral_norm_bound: never below the truth, close to it, the same everywhere, and honest at the edges.

Derivatives and transforms are in test_spectral_derivatives.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from scipy.linalg import hadamard, hilbert
from torch import Tensor

import lipformer.functional.spectral.bound as spectral
from lipformer.functional import spectral_norm_bound
from lipformer.functional.spectral.top_vector import (
    gram_matrix,
    lanczos_steps,
    start_vector,
    top_eigenvector,
)

METHODS = ["cholesky", "gram", "svd"]
F64 = torch.float64


def truth(weight: Tensor) -> Tensor:
    """Largest singular value by SVD in float64, of the weight scaled to entries of at most 1."""
    w = weight.double()
    top = w.abs().amax(dim=(-2, -1), keepdim=True)
    top = torch.where(top > 0, top, 1.0)
    return torch.linalg.svdvals(w / top)[..., 0] * top[..., 0, 0]


def overshoot(weight: Tensor, method: str = "cholesky") -> float:
    """bound / truth - 1; asserts that the bound is not below the SVD, whose own error is 1e-14."""
    bound, exact = spectral_norm_bound(weight, method=method).double(), truth(weight)
    assert (bound >= exact * (1 - 1e-14)).all()
    return (bound / exact - 1).max().item()


def exactly_bounds(weight: Tensor, bound: Tensor) -> bool:
    """Whether bound^2 I - W^T W is positive definite, in rational arithmetic: no rounding at all."""
    w = [[Fraction(x) for x in row] for row in weight.double().tolist()]
    n, square = len(w[0]), Fraction(bound.item()) ** 2
    m = [[square * (i == j) - sum(row[i] * row[j] for row in w) for j in range(n)] for i in range(n)]
    for k in range(n):  # symmetric Gaussian elimination: all pivots must be positive
        if m[k][k] <= 0:
            return False
        for i in range(k + 1, n):
            factor = m[i][k] / m[k][k]
            m[i] = [x - factor * y for x, y in zip(m[i], m[k], strict=True)]
    return True


def with_values(m: int, n: int, values: Tensor) -> Tensor:
    """Random m x n matrix with the given singular values."""
    r = min(m, n)
    u = torch.linalg.qr(torch.randn(m, r, dtype=F64)).Q
    v = torch.linalg.qr(torch.randn(n, r, dtype=F64)).Q
    return (u * values) @ v.mT


def _sparse(n: int) -> Tensor:
    return torch.randn(n, n) * (torch.rand(n, n) < 0.02)


def _one_huge(n: int) -> Tensor:
    w = torch.randn(n, n)
    w[3, 5] = 1e6
    return w


FAMILIES: dict[str, Callable[[int, int], Tensor]] = {
    "gaussian": lambda m, n: torch.randn(m, n),
    "orthogonal": lambda m, n: with_values(m, n, torch.ones(min(m, n), dtype=F64)).float(),
    "rank one": lambda m, n: torch.outer(torch.randn(m), torch.randn(n)),
    "ill-conditioned": lambda m, n: with_values(m, n, torch.logspace(0, -12, min(m, n), dtype=F64)),
    "constant": lambda m, n: torch.full((m, n), 0.1),
    "alternating": lambda m, n: torch.full((m, n), 0.1) * (-1.0) ** torch.arange(n),
    "near-degenerate pair": lambda m, n: with_values(
        m,
        n,
        torch.cat([torch.tensor([1 + 1e-9, 1.0], dtype=F64), torch.rand(min(m, n) - 2).double()]),
    ),
    "clustered": lambda m, n: with_values(m, n, torch.linspace(0.97, 1, min(m, n), dtype=F64)),
    "outlier above a bulk": lambda m, n: with_values(
        m,
        n,
        torch.cat([torch.tensor([1.02], dtype=F64), torch.linspace(0, 1, min(m, n) - 1).double()]),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(64, 64), (150, 150), (80, 300), (300, 80)])
def test_default_is_sound_and_within_one_percent(family: str, shape: tuple[int, int]) -> None:
    weight = FAMILIES[family](*shape)
    assert overshoot(weight) <= 0.01
    assert overshoot(weight.bfloat16()) <= 0.01


@pytest.fixture(params=["squaring", "lanczos"])
def candidate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to a candidate, whichever this device and size would take."""
    monkeypatch.setattr(spectral, "_squares", lambda n, device: request.param == "squaring")
    return str(request.param)


@pytest.mark.usefixtures("candidate")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(100, 100), (150, 300)])
def test_both_candidates_are_sound_and_within_one_percent(family: str, shape: tuple[int, int]) -> None:
    assert overshoot(FAMILIES[family](*shape)) < 0.0081
    assert overshoot(FAMILIES[family](*shape).float()) < 0.0081


@pytest.mark.parametrize("squarings", [1, 3, 9, 28])
@pytest.mark.parametrize("family", FAMILIES)
def test_squaring_keeps_its_promise(squarings: int, family: str) -> None:
    """The Rayleigh quotient is at least n^(-1/p) of the largest eigenvalue, p = 2^squarings."""
    a = FAMILIES[family](80, 60).double()
    gram = a.mT @ a
    v = top_eigenvector(gram, squarings)
    quotient = (v.mT @ gram @ v / (v.mT @ v)).item()
    assert quotient >= truth(a).item() ** 2 * 60 ** (-(0.5**squarings)) * (1 - 1e-8)


def test_several_weights_are_bounded_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.randn(s) for s in ((70, 80), (80, 70), (3, 5, 4), (4, 5), (200, 150), (70, 80))]
    weights.append(torch.randn(6, 4).bfloat16())
    calls = []
    bound = spectral.spectral_norm_bound
    monkeypatch.setattr(
        spectral, "spectral_norm_bound", lambda w: calls.append(tuple(w.shape)) or bound(w)
    )
    found = spectral.spectral_norm_bounds(weights)
    # Large matrices are not stacked on a CPU.
    assert sorted(calls) == sorted([(3, 80, 70), (4, 5, 4), (1, 200, 150), (1, 6, 4)])
    for weight, value in zip(weights, found, strict=True):
        assert value.dtype == F64
        assert value.shape == weight.shape[:-2]
        torch.testing.assert_close(value, bound(weight).double(), rtol=1e-6, atol=0)
        assert (value >= truth(weight)).all()


def test_a_stack_that_is_too_large_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.randn(5, 4, requires_grad=True) for _ in range(7)]
    whole = spectral.spectral_norm_bounds(weights)
    monkeypatch.setattr(spectral, "_LARGEST_STACK", 45)
    cut = spectral.spectral_norm_bounds(weights)
    assert torch.equal(torch.stack(whole), torch.stack(cut))
    gradient = torch.autograd.grad(sum(cut), weights)  # type: ignore[arg-type]
    for weight, g in zip(weights, gradient, strict=True):
        torch.testing.assert_close(g, torch.autograd.grad(spectral_norm_bound(weight), weight)[0])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(7, 5), (2, 70, 90), (0, 4, 3)])
@pytest.mark.parametrize("dtype", [F64, torch.bfloat16])
def test_fake_outputs_are_empty_and_alike(
    method: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight = torch.randn(shape).to(dtype)
    real, fake = spectral._compute(weight, method), spectral._empty(weight, method)
    assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in fake]


@pytest.mark.parametrize("method", ["gram", "svd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_methods_are_sound_and_within_one_percent(method: str, family: str) -> None:
    for shape in [(64, 64), (65, 130), (130, 65)]:
        gap = overshoot(FAMILIES[family](*shape).double(), method)
        assert gap <= (0.01 if method == "gram" else 1e-9)


@pytest.mark.parametrize("family", ["gaussian", "orthogonal", "rank one", "ill-conditioned"])
def test_large_matrices_stay_within_one_percent(family: str) -> None:
    assert overshoot(FAMILIES[family](512, 512)) <= 0.01


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(1024, 1024), (512, 2048), (2048, 512)])
def test_largest_matrices_stay_within_one_percent(family: str, shape: tuple[int, int]) -> None:
    assert overshoot(FAMILIES[family](*shape)) <= 0.01


@pytest.mark.parametrize("method", METHODS)
def test_structured_matrices(method: str) -> None:
    for weight in (
        torch.from_numpy(hilbert(30)),
        torch.from_numpy(hilbert(90)),
        torch.from_numpy(hilbert(90)).float(),
        _sparse(150),
        _one_huge(100),
        torch.diag(torch.tensor([3.0, 3.0, 3.0, 1.0])),
        torch.eye(100)[torch.randperm(100)],
        torch.block_diag(torch.randn(80, 80), 5 * torch.randn(20, 20)),
        torch.tril(torch.ones(120, 120)),
    ):
        assert overshoot(weight, method) <= 0.011


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_never_below_in_exact_arithmetic(method: str, dtype: torch.dtype) -> None:
    """Random, repeated, nearly repeated and rank-deficient values, checked without any rounding."""
    matrices = [torch.randn(m, n) for m, n in [(1, 1), (1, 6), (6, 1), (3, 2), (4, 7), (6, 6)]]
    matrices += [with_values(5, 4, torch.tensor(s)) for s in ([1.0] * 4, [1, 1 - 1e-8, 0.5, 0])]
    matrices += [torch.randint(-3, 4, (5, 5)) + 0.0, torch.ones(4, 4), torch.eye(5) / 3]
    for matrix in matrices:
        for scale in (1.0, 1e-3, 3e3):
            weight = (matrix * scale).to(dtype)
            bound = spectral_norm_bound(weight, method=method)
            assert bound.dtype == (dtype if dtype == F64 else torch.float32)
            if weight.any():
                assert exactly_bounds(weight, bound)


def test_the_exact_oracle_can_fail() -> None:
    weight = torch.eye(3)
    assert exactly_bounds(weight, torch.tensor(1.0 + 2**-23))
    assert not exactly_bounds(weight, torch.tensor(1.0 - 2**-24))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [4, 64, 128])
def test_known_norms_to_the_last_bit(method: str, n: int) -> None:
    """Norms that are exact: the square of the returned number is compared in integers."""
    a, b = torch.randint(1, 9, (n,)), torch.randint(1, 9, (n,))
    cases = [
        (torch.from_numpy(hadamard(n)), n),
        (torch.eye(n)[torch.randperm(n)], 1),
        (torch.diag(torch.arange(1, n + 1)), n**2),
        (torch.outer(a, b), int((a * a).sum() * (b * b).sum())),
        (torch.ones(n, 2 * n), 2 * n**2),
    ]
    for matrix, square in cases:
        for dtype in (torch.float32, torch.float64):
            bound = spectral_norm_bound(matrix.to(dtype), method=method)
            assert square <= Fraction(bound.item()) ** 2 <= square * Fraction(103, 100)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [(6, 4), (80, 70)])
def test_extreme_scales(method: str, size: tuple[int, int]) -> None:
    for scale in (1e-30, 1e30):
        assert overshoot(torch.randn(size) * scale, method) <= 0.01
    for scale in (1e-300, 1e-308, 1e300):
        assert overshoot(torch.randn(size, dtype=F64) * scale, method) <= 0.01
    # Subnormal weights: a step to the next number is a large one, but it goes up.
    tiny = torch.randn(size).sign() * 2.0**-149
    assert spectral_norm_bound(tiny, method=method).double() >= truth(tiny)
    # The norm overflows although no entry does: infinity is the only bound there is.
    assert spectral_norm_bound(torch.full(size, 3e38), method=method) == torch.inf


@pytest.mark.parametrize("method", METHODS)
def test_zero_and_empty(method: str) -> None:
    for shape in [(1, 1), (3, 4), (100, 70), (2, 70, 100)]:
        weight = torch.zeros(shape, requires_grad=True)
        bound = spectral_norm_bound(weight, method=method)
        assert (bound == 0).all()
        assert (torch.autograd.grad(bound.sum(), weight)[0] == 0).all()
    for shape in [(0, 4), (4, 0), (3, 0, 4), (0, 4, 4), (0, 80, 70)]:
        bound = spectral_norm_bound(torch.ones(shape), method=method)
        assert bound.shape == shape[:-2]
        assert (bound == 0).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_weights_give_no_finite_bound(method: str, bad: float) -> None:
    for shape in [(1, 1), (5, 3), (70, 90)]:
        weight = torch.randn(2, *shape)
        weight[0, -1, 0] = bad
        bound = spectral_norm_bound(weight, method=method)
        assert not bound[0].isfinite()
        assert bound[1] == spectral_norm_bound(weight[1], method=method)


@pytest.mark.parametrize("gap", [1e-7, 1e-3, 0.1, 1.0])
def test_sound_when_the_start_vector_cannot_see_the_top(gap: float) -> None:
    """The top right singular vector is orthogonal to the start: Lanczos proposes too small a value."""
    n = 100
    start = start_vector(n, torch.zeros((), dtype=F64))
    top = torch.randn(n, 1, dtype=F64)
    top = top - start @ (start.mT @ top)
    top = top / top.norm()
    weight = torch.eye(n, dtype=F64) + gap * top @ top.mT
    bound = spectral_norm_bound(weight)
    assert bound >= 1 + gap
    # If rounding has not brought the top in, the looser bound is in force.
    assert bound <= (weight.mT @ weight).norm().sqrt() * (1 + 1e-9)


@pytest.mark.parametrize("method", ["cholesky", "svd"])
def test_sound_whatever_is_proposed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof does not rest on the proposal: worst, zero and NaN vectors still give bounds."""
    weights = torch.randn(3, 70, 80)
    for v in (
        torch.linalg.svd(weights.double().mT).Vh[:, -1:].mT,
        torch.zeros(3, 70, 1, dtype=F64),
        torch.full((3, 70, 1), math.nan, dtype=F64),
    ):
        monkeypatch.setattr(spectral, "_candidate", lambda *args, v=v: (v, 0.0))
        bound = spectral_norm_bound(weights, method=method)
        assert (bound.double() >= truth(weights)).all()
        assert bound.isfinite().all()


def test_verification_refuses_what_is_too_small() -> None:
    for n in (3, 60, 200):
        w = torch.randn(2 * n, n, dtype=F64)
        square = truth(w).square()
        for change, accepted in [(1e-8, True), (-1e-8, False), (-0.5, False), (math.nan, False)]:
            shift = square * (1 + change)
            got = spectral.verified_square(gram_matrix(w), shift)
            assert (got == shift).item() is accepted
            assert got >= square


def test_power_iteration_of_the_same_cost_lies_below() -> None:
    """Negative control: the usual estimate is no bound, and verification would reject it."""
    for n in (150, 200, 300):
        w = torch.randn(n, n, dtype=F64)
        gram, v = gram_matrix(w), start_vector(n, w)
        for _ in range(lanczos_steps(n)):
            v = gram @ v
            v = v / v.norm()
        estimate = (w @ v).norm()
        assert estimate < truth(w) * (1 - 1e-6)
        assert spectral.verified_square(gram.clone(), estimate.square()) > estimate.square()
        assert spectral_norm_bound(w) > truth(w)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (3, 70, 80)])
def test_batch_equals_loop(method: str, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, dtype=F64) * torch.logspace(-3, 3, shape[0]).view(
        -1, *[1] * (len(shape) - 1)
    )
    bound = spectral_norm_bound(weight, method=method)
    assert bound.shape == shape[:-2]
    loop = [spectral_norm_bound(w, method=method) for w in weight.flatten(0, -3)]
    torch.testing.assert_close(bound.flatten(), torch.stack(loop), rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_one_weight_has_one_bound(method: str) -> None:
    """No state, no randomness, and nothing that autocast, grad mode or a copy could change."""
    weight = torch.randn(90, 80, requires_grad=True)
    before = torch.get_rng_state()
    bound = spectral_norm_bound(weight, method=method)
    assert torch.equal(torch.get_rng_state(), before)
    copy = weight.detach().clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert spectral_norm_bound(copy, method=method) == bound
    with torch.inference_mode():
        assert spectral_norm_bound(copy, method=method) == bound
    assert spectral_norm_bound(copy.mT.contiguous().mT, method=method) == pytest.approx(
        bound.item(), rel=1e-6
    )
    assert torch.equal(copy, weight)  # the weight itself is left alone


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"got torch\.complex64"):
        spectral_norm_bound(torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"\['cholesky', 'gram', 'svd'\], got 'power'"):
        spectral_norm_bound(torch.ones(2, 2), method="power")
