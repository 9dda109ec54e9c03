"""The solver on maps whose solution is known: counts, promises, precision, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from lipformer.flows import NotConverged, Record, solve_fixed_point
from lipformer.flows.solve.norms import DUAL_MEASURES, MEASURES, l2_size

F64 = torch.float64


def rotation(n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=F64))[0]


def spectrum(low: float, high: float, n: int, seed: int) -> Tensor:
    basis = rotation(n, seed)
    return basis @ torch.linspace(low, high, n, dtype=F64).diag() @ basis.T


def matrix(kind: str, c: float, n: int, seed: int) -> Tensor:
    """A matrix of spectral norm c."""
    if kind == "positive":
        return spectrum(0.0, c, n, seed)
    if kind == "symmetric":
        return spectrum(-c, c, n, seed)
    if kind == "orthogonal":
        return c * rotation(n, seed)
    if kind == "cycle":
        return c * torch.eye(n, dtype=F64).roll(1, 0)
    if kind == "nilpotent":
        basis = rotation(n, seed)
        return c * basis @ torch.ones(n - 1, dtype=F64).diag(1) @ basis.T
    full = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=F64)
    full = full - full.T if kind == "skew" else full
    return c * full / torch.linalg.matrix_norm(full, 2)


KINDS = ("positive", "symmetric", "orthogonal", "cycle", "nilpotent", "skew", "random")


def right_hand_side(n: int, seed: int, batch: int = 3, dtype: torch.dtype = F64) -> Tensor:
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randn(batch, 1, n, generator=generator, dtype=F64).to(dtype)


def solve(a: Tensor, y: Tensor, rate: float, **options: object) -> tuple[Tensor, Record]:
    return solve_fixed_point(lambda x, index: x @ a.T, y, rate=rate, measure=l2_size, **options)


@pytest.mark.parametrize("n", [8, 64, 512])
@pytest.mark.parametrize(("kind", "most"), [("positive", 12), ("symmetric", 40)])
def test_counts_of_acceleration(kind: str, most: int, n: int) -> None:
    """Issue 3: coeff 0.9 and tol 1e-6. Plain iteration needs more than a hundred."""
    for seed in range(2):
        a, y = matrix(kind, 0.9, n, seed), right_hand_side(n, seed)
        assert solve(a, y, 0.9, accelerate=True)[1].iterations <= most
        # By default it is looked for once steps prove to be slow.
        assert solve(a, y, 0.9)[1].iterations <= most + 8
        assert solve(a, y, 0.9, accelerate=False)[1].iterations > 100


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_never_more_than_plain_iteration_and_five(kind: str, dtype: torch.dtype) -> None:
    for n in (8, 64, 256):
        for seed in range(2 if n == 8 else 1):
            a, y = matrix(kind, 0.9, n, seed).to(dtype), right_hand_side(n, seed, dtype=dtype)
            plain = solve(a, y, 0.9, accelerate=False)[1].evaluations
            for flag in (None, True):
                fast = solve(a, y, 0.9, accelerate=flag)[1].evaluations
                assert bool((fast <= plain + 5).all()), (n, seed, flag, fast, plain)


@pytest.mark.parametrize("name", ["relu", "abs", "tanh", "sin"])
def test_nonlinear_maps_are_no_slower_than_plain(name: str) -> None:
    bend = getattr(torch, name)
    for kind in KINDS:
        a, y = matrix(kind, 0.9, 32, 0), right_hand_side(32, 0)

        def branch(x: Tensor, index: Tensor, a: Tensor = a) -> Tensor:
            return bend(x @ a.T)

        records = [
            solve_fixed_point(branch, y, rate=0.9, measure=l2_size, accelerate=flag)[1]
            for flag in (False, None, True)
        ]
        for record in records[1:]:
            assert bool((record.evaluations <= records[0].evaluations + 5).all()), kind


def test_secant_steps_pay_where_plain_ones_are_not_slow_enough_for_more() -> None:
    """As in flows, where the rate is far from reached: a quarter of the evaluations less."""
    a, y = matrix("positive", 0.5, 64, 0), right_hand_side(64, 0)
    plain, secant = (solve(a, y, 0.9, accelerate=flag)[1].iterations for flag in (False, None))
    assert plain <= 30
    assert secant <= 0.75 * plain


@pytest.mark.parametrize("accelerate", [True, False, None])
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_bound_is_a_promise(kind: str, accelerate: bool) -> None:
    plain = accelerate is False
    for c in (0.5, 0.9) if plain else (0.5, 0.9, 0.97):
        for tol in (1e-2, 0.0) if plain else (1e-2, 1e-6, 0.0):
            a, y = matrix(kind, c, 24, 1), 30.0 * right_hand_side(24, 1)
            x, record = solve(a, y, c, tol=tol, accelerate=accelerate, max_iter=5000)
            exact = torch.linalg.solve(torch.eye(24, dtype=F64) + a, y.mT).mT
            error = l2_size(x - exact)
            assert bool((error <= record.error_bound).all())
            allowed = tol * y.flatten(1).abs().amax(1) + 1e-10
            assert bool((error <= allowed).all())


def test_a_wrong_rate_voids_the_promise() -> None:
    """Negative control: told 0.5 for a map of 0.97, the bound is below the error."""
    y = right_hand_side(8, 0)
    x, record = solve(-0.97 * torch.eye(8, dtype=F64), y, 0.5, tol=1e-3, accelerate=False)
    assert bool((l2_size(x - y / 0.03) > record.error_bound).any())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
def test_a_tolerance_below_the_precision_gives_the_limit_of_precision(
    dtype: torch.dtype, scale: float
) -> None:
    for kind in KINDS:
        a = matrix(kind, 0.9, 64, 0).to(dtype)
        y = scale * right_hand_side(64, 0, dtype=dtype)
        x, record = solve(a, y, 0.9, tol=0.0)
        exact = torch.linalg.solve(torch.eye(64, dtype=F64) + a.double(), y.double().mT).mT
        error = l2_size(x.double() - exact)
        size = l2_size(y.double())
        assert record.converged
        assert bool((error <= record.error_bound).all())
        assert bool((error <= 40 * torch.finfo(dtype).eps * size).all()), kind
        assert bool((record.error_bound <= 2000 * torch.finfo(dtype).eps * size).all()), kind


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_step_in_float64_takes_the_rounding_out(kind: str) -> None:
    a, y = matrix(kind, 0.2, 24, 0).float(), right_hand_side(24, 0, dtype=torch.float32)
    exact = torch.linalg.solve(torch.eye(24, dtype=F64) + a.double(), y.double().mT).mT
    for bias in (0.0, 100.0):  # which cancels, but for its rounding

        def branch(x: Tensor, index: Tensor, bias: float = bias) -> Tensor:
            return x @ a.T + bias - bias

        x, record = solve_fixed_point(branch, y, rate=0.9, measure=l2_size)
        error = l2_size(x.double() - exact)
        assert bool((error <= record.error_bound).all())
        assert bool((error <= 2.0 * record.tolerance).all()), "rounded steps end at 4 to 7 times it"
        share = (record.error_bound / record.tolerance).max()
        assert bias or share <= 1.5, "rounded steps promise twice the tolerance"


@pytest.mark.parametrize("accelerate", [True, False, None])
def test_a_sample_does_not_depend_on_the_others(accelerate: bool) -> None:
    a = matrix("symmetric", 0.9, 16, 0)
    scale = torch.tensor([0.0, 1e-6, 1.0, 1e3], dtype=F64)[:, None, None]
    y = right_hand_side(16, 0, batch=4) * scale
    calls: list[list[int]] = []

    def branch(x: Tensor, index: Tensor) -> Tensor:
        calls.append(index.tolist())
        return x @ a.T

    x, record = solve_fixed_point(branch, y, rate=0.9, measure=l2_size, accelerate=accelerate)
    assert calls.pop() == [0, 1, 2, 3], "the last tells the rounding"
    counts = [sum(k in call for call in calls) for k in range(4)]
    assert counts == record.evaluations.tolist()
    assert counts[0] == 1
    assert len(calls[-1]) < 4, "finished samples are taken out"
    for k in range(4):
        alone, single = solve(a, y[k : k + 1], 0.9, accelerate=accelerate)
        # Acceleration solves small systems that enlarge the rounding of batched products.
        atol = 1e-13 if accelerate is False else 1e-9
        torch.testing.assert_close(alone[0], x[k], rtol=atol, atol=atol)
        assert abs(single.iterations - counts[k]) <= 1


@pytest.mark.parametrize("norm", MEASURES)
def test_norms_are_dual(norm: str) -> None:
    """|<u, v>| <= ||u|| ||v||*, with equality for some u: here found among extreme points."""
    u, v = torch.randn(50, 4, 3, dtype=F64), torch.randn(50, 4, 3, dtype=F64)
    inner = (u * v).sum((1, 2))
    assert bool((inner.abs() <= MEASURES[norm](u) * DUAL_MEASURES[norm](v) * (1 + 1e-12)).all())
    best = {"l2": v, "token": v / v.norm(dim=-1, keepdim=True), "linf": v.sign()}[norm]
    found = (best * v).sum((1, 2)) / MEASURES[norm](best)
    torch.testing.assert_close(found, DUAL_MEASURES[norm](v))


def test_non_convergence_raises_with_the_residual() -> None:
    a, y = matrix("orthogonal", 0.97, 32, 0), right_hand_side(32, 0)
    with pytest.raises(NotConverged, match=r"max_iter=20 .*residual [0-9.e+-]+") as caught:
        solve(a, y, 0.97, max_iter=20)
    record = caught.value.record
    assert not record.converged
    assert bool((record.residual > 0.1).all())
    assert record.iterations == 20


@pytest.mark.parametrize("accelerate", [True, False, None])
def test_a_map_that_expands_is_not_called_converged(accelerate: bool) -> None:
    a, y = 3.0 * rotation(16, 0), right_hand_side(16, 0)
    with pytest.raises(NotConverged):
        solve_fixed_point(
            lambda x, index: torch.sin(40 * x @ a.T),
            y,
            rate=0.9,
            measure=l2_size,
            max_iter=200,
            accelerate=accelerate,
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_raises_at_once(bad: float) -> None:
    y = right_hand_side(8, 0)
    y[1, 0, 3] = y[2, 0, 5] = bad

    def branch(x: Tensor, index: Tensor) -> Tensor:
        raise AssertionError("evaluated")

    with pytest.raises(ValueError, match="2 NaN or infinite entries of 24"):
        solve_fixed_point(branch, y, rate=0.9, measure=l2_size)


@pytest.mark.parametrize(
    "wrong", [{"rate": 1.0}, {"rate": 0.0}, {"tol": -1.0}, {"max_iter": 0}, {"tol": float("nan")}]
)
def test_bad_numbers_are_echoed(wrong: dict[str, float]) -> None:
    options = {"rate": 0.9, **wrong}
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=f"{name} must .* got {value!r}"):
        solve_fixed_point(lambda x, i: x, right_hand_side(4, 0), measure=l2_size, **options)


def test_empty_batches_and_constant_branches() -> None:
    x, record = solve(torch.zeros(4, 4, dtype=F64), torch.zeros(0, 1, 4, dtype=F64), 0.5)
    assert x.shape == (0, 1, 4)
    assert record.iterations == 0
    y = right_hand_side(4, 0)
    x, record = solve_fixed_point(lambda x, i: torch.ones_like(x), y, rate=0.5, measure=l2_size)
    torch.testing.assert_close(x, y - 1)
    assert record.iterations == 2
    assert dataclasses.is_dataclass(record)
