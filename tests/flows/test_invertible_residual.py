"""Invertible blocks: the battery, round trips at every scale, deep stacks, and what they refuse."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.flows import NotConverged, estimate_inverse_gain
from tests.flows.blocks import block, branch
from tests.layers.battery import CertifiedLayer, error, saved, scrambled, slow_compile

F64 = torch.float64
D = 8
SCALES = (1e-2, 1.0, 30.0, 1e3)
PROMISED = {torch.float32: 1e-5, torch.float64: 1e-11}


class TestNorm(CertifiedLayer):
    norms = ("l2", "token", "linf")
    least = 0.2

    def make(self) -> nn.Module:
        return lf.InvertibleResidual(branch("paper", max_len=5), 0.9, norm="l2")

    def test_the_constant_is_one_and_the_coefficient(self) -> None:
        assert 1.9 <= self.bound(self.made()) <= 1.9 * (1 + 1e-12)


class TestCausal(CertifiedLayer):
    least = 0.05

    def make(self) -> nn.Module:
        return lf.InvertibleResidual(branch("attention", causal=True, max_len=5), 0.9, "causal")

    test_compile = slow_compile

    def test_the_own_constant_is_one_and_the_coefficient(self) -> None:
        assert 1.9 <= self.bound(self.made(), "self") <= 1.9 * (1 + 1e-12)


class TestFeedForward(CertifiedLayer):
    least = 0.2

    def make(self) -> nn.Module:
        return lf.InvertibleResidual(lf.FeedForward(D, 12), 0.9)

    test_compile = slow_compile


def round_trip(made: lf.InvertibleResidual, n: int, scale: float, mask: Tensor | None = None) -> float:
    """The largest error of inverse(forward(x)), relative to the largest entry of x."""
    dtype = next(made.parameters()).dtype
    x = scale * torch.randn(2, n, D, dtype=F64).to(dtype)
    with torch.no_grad():
        y = made(x, mask)
        # A tolerance is relative to max(1, max|y|): for small inputs a smaller one is asked for.
        back = made.inverse(y, mask, tol=0.1 * PROMISED[dtype] * min(1.0, scale))
    assert made.record is not None
    assert made.record.converged
    return float((back - x).abs().max() / x.abs().max())


@pytest.mark.parametrize("dtype", PROMISED, ids=str)
@pytest.mark.parametrize("mode", ["norm", "causal"])
@pytest.mark.parametrize("coeff", [0.5, 0.9, 0.97])
def test_round_trips(coeff: float, mode: str, dtype: torch.dtype) -> None:
    for name in ("attention", "paper", "sequence"):
        made = scrambled(block(name, coeff, mode)).to(dtype)
        for scale in SCALES:
            assert round_trip(made, 12, scale) <= PROMISED[dtype], (name, scale)
    for scale in (1e-2, 1e3):
        assert round_trip(block("attention", coeff, mode).to(dtype), 256, scale) <= PROMISED[dtype]


@pytest.mark.parametrize("dtype", PROMISED, ids=str)
@pytest.mark.parametrize("mode", ["norm", "causal"])
def test_round_trips_after_training_and_loading(mode: str, dtype: torch.dtype) -> None:
    made = block("attention", 0.97, mode, seq_len=32).to(dtype).train()
    optimizer = torch.optim.Adam(made.parameters(), lr=0.02)
    x, target = torch.randn(4, 6, D, dtype=dtype), torch.randn(4, 6, D, dtype=dtype)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = (made(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.97 * losses[0], "it was trained"
    loaded = block("attention", 0.97, mode, seq_len=32).to(dtype)
    loaded.load_state_dict(saved(made))
    for each in (made.eval(), loaded, copy.deepcopy(made), lf.bake(made)):
        for scale in (1e-2, 1.0, 1e3):
            assert round_trip(each, 32, scale) <= PROMISED[dtype], scale


def stack(depth: int, coeff: float, mode: str, dtype: torch.dtype) -> list[lf.InvertibleResidual]:
    kinds = ("attention", "feed-forward")
    return [scrambled(block(kinds[k % 2], coeff, mode)).to(dtype) for k in range(depth)]


@pytest.mark.parametrize("dtype", PROMISED, ids=str)
@pytest.mark.parametrize(
    ("mode", "coeff"),
    [pytest.param("norm", 0.5, marks=pytest.mark.slow), ("norm", 0.9), ("causal", 0.9)],
)
def test_sixteen_blocks(mode: str, coeff: float, dtype: torch.dtype) -> None:
    """Judged by forward(inverse(y)); the error in x is as large as the measured conditioning allows."""
    blocks = stack(16, coeff, mode, dtype)
    x = torch.randn(2, 16, D, dtype=F64).to(dtype)
    with torch.no_grad():
        y = x
        for each in blocks:
            y = each(y)
        back = y
        for each in reversed(blocks):
            back = each.inverse(back, tol=1e-7 * PROMISED[dtype])
        again = back
        for each in blocks:
            again = each(again)
    assert error(again, y) <= PROMISED[dtype]
    gain = float(estimate_inverse_gain(blocks, x, steps=4).max())
    eps = torch.finfo(dtype).eps
    assert float((back - x).norm()) <= 200 * gain * eps * float(y.norm() + x.norm())


def test_the_estimated_gain_is_the_dense_one() -> None:
    for mode in ("norm", "causal"):
        blocks = stack(2, 0.9, mode, F64)
        x = torch.randn(2, 4, D, dtype=F64)

        def forward(x: Tensor, blocks: list[lf.InvertibleResidual] = blocks) -> Tensor:
            for each in blocks:
                x = each(x[None])[0]
            return x

        estimate = estimate_inverse_gain(blocks, x, steps=25)
        for k in range(2):
            dense = torch.autograd.functional.jacobian(forward, x[k]).reshape(4 * D, 4 * D)
            exact = 1.0 / float(torch.linalg.svdvals(dense)[-1])
            assert 0.8 * exact <= float(estimate[k]) <= exact * (1 + 1e-4)


def test_the_norm_in_use_is_the_one_of_the_smallest_bound() -> None:
    """It changes with the weights, and the inverse follows."""
    made = block("attention").double()
    seen = set()
    for size in (0.01, 1.0, 4.0):
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(torch.randn_like(parameter) * size)
            made.branch.module.q_proj.weight[:, 1:] *= 1e-3
            made.branch.module.out_proj.weight[1:] *= 1e-3
        norm = made.norm_in_use()
        bounds = {n: lf.certify(made.branch.module, norm=n).bound for n in ("l2", "token", "linf")}
        assert norm in bounds
        assert lf.certify(made.branch, norm=norm).bound <= 0.9 * (1 + 1e-12)
        seen.add(norm)
        assert round_trip(made, 16, 1.0) <= 1e-11
    for norm in ("l2", "token", "linf"):
        fixed = scrambled(block("attention", norm=norm)).double()
        assert fixed.norm_in_use() == norm
        assert round_trip(fixed, 16, 1.0) <= 1e-11
    assert seen <= {"l2", "token", "linf"}


@pytest.mark.parametrize("mode", ["norm", "causal"])
def test_padded_tokens_pass_unchanged_and_influence_none(mode: str) -> None:
    made = scrambled(block("sequence", 0.9, mode)).double()
    x = torch.randn(3, 10, D, dtype=F64)
    mask = torch.zeros(3, 10, dtype=torch.bool)
    mask[0, 7:] = mask[2, 4:] = True
    with torch.no_grad():
        y = made(x, mask)
        assert torch.equal(y[mask], x[mask])
        back = made.inverse(y, mask, tol=1e-13)
        assert torch.equal(back[mask], x[mask])
        assert error(back, x) <= 1e-11
        short = made.inverse(y[2:, :4], tol=1e-13)
        assert error(back[2:, :4], short) <= 1e-11
        wild = y.masked_fill(mask.unsqueeze(-1), torch.nan)
        assert error(made.inverse(wild, mask, tol=1e-13)[~mask], x[~mask]) <= 1e-11


def test_the_record() -> None:
    made = scrambled(block("attention")).double()
    y = torch.randn(3, 10, D, dtype=F64)
    assert made.record is None
    x, record = made.inverse_with_record(y, tol=1e-4)
    assert record.met_tolerance
    assert bool((record.error_bound <= record.tolerance).all())
    _, closer = made.inverse_with_record(y, tol=1e-18)
    assert closer.converged
    assert not closer.met_tolerance
    assert made.record is None
    made.inverse(y, tol=1e-4)
    assert made.record is not None
    assert record.evaluations.shape == record.residual.shape == record.error_bound.shape == (3,)
    best = made.inverse(y, tol=1e-14)
    assert bool(((x - best).flatten(1).norm(dim=1) <= record.error_bound).all())
    assert copy.deepcopy(made).record is None
    assert pickle.loads(pickle.dumps(made)).record is None
    assert "record" not in "".join(made.state_dict())


def test_the_inverse_runs_outside_autocast_in_the_dtype_of_the_weights() -> None:
    made = scrambled(block("attention"))
    x = torch.randn(2, 10, D)
    with torch.no_grad():
        y = made(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            back = made.inverse(y, tol=1e-6)
            low = made.inverse(y.bfloat16(), tol=1e-6)
    assert back.dtype == low.dtype == torch.float32
    assert error(back, x) <= 1e-5
    with pytest.raises(ValueError, match=r"not be wider than .*float32, got torch.float64"):
        made.inverse(y.double())
    half = block("feed-forward").bfloat16()
    y = half(x.bfloat16())
    assert error(half.inverse(y), x) <= 0.1


@pytest.mark.parametrize("method", ["exact", "series", "roulette"])
@pytest.mark.parametrize("mode", ["norm", "causal"])
def test_log_dets_of_both_directions(mode: str, method: str) -> None:
    """The inverse's has the other sign and is taken at the solution."""
    made = scrambled(block("sequence", 0.9, mode)).double()
    x = torch.randn(2, 4, D, dtype=F64)
    seeds = (torch.Generator().manual_seed(0) for _ in range(2))
    y, log_det = made.forward_and_log_det(x, method=method, generator=next(seeds))
    torch.testing.assert_close(y, made(x))
    assert log_det.abs().min() > 1e-6, "of zero the sign would not show"
    back, minus = made.inverse_and_log_det(y, method=method, tol=1e-13, generator=next(seeds))
    assert error(back, x) <= 1e-11
    torch.testing.assert_close(minus, -log_det, rtol=0, atol=1e-9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_raises_at_once(bad: float) -> None:
    for mode in ("norm", "causal"):
        y = torch.randn(2, 4, D)
        y[0, 1, 2] = bad
        with pytest.raises(ValueError, match="1 NaN or infinite entries of 64"):
            block("attention", 0.9, mode).inverse(y)


def test_no_convergence_raises() -> None:
    made = scrambled(block("feed-forward", 0.97)).double()
    with pytest.raises(NotConverged, match="max_iter=2"):
        made.inverse(torch.randn(2, 4, D, dtype=F64), max_iter=2)


@pytest.mark.parametrize("coeff", [0.0, 1.0, 1.5, -0.1, float("nan")])
def test_coefficients_without_an_inverse_are_refused(coeff: float) -> None:
    with pytest.raises(ValueError, match=f"coeff must lie between 0 and 1.* got {coeff!r}"):
        lf.InvertibleResidual(lf.FeedForward(D, 16), coeff)


def test_the_solver_has_the_coefficient_of_the_branch() -> None:
    """Issue 12: set on the block alone, it was the rate of the solver but not of the branch."""
    made = block("feed-forward", 0.9)
    made.coeff = 0.1
    assert made.branch.coeff == 0.1
    with pytest.raises(ValueError, match="between 0 and 1"):
        made.coeff = 1.0
    made.branch.coeff = 0.5
    assert made.coeff == 0.5
    assert lf.certify(made.branch, norm=made.norm_in_use()).bound <= 0.5
    baked = lf.bake(made)
    assert baked.coeff == lf.bake(baked).coeff == 0.5
    with pytest.raises(AttributeError, match=r"in its weights: 0\.5, got 0\.1"):
        baked.coeff = 0.1
    y = torch.randn(2, 5, D)
    torch.testing.assert_close(baked.inverse(y), made.inverse(y), rtol=1e-5, atol=1e-5)


def test_a_length_that_is_taken_away_later_still_holds() -> None:
    """Issue 12: longer inputs than the branch was divided for must not pass."""
    made = lf.InvertibleResidual(lf.L2MultiheadAttention(D, 2, batch_first=True), seq_len=2)
    made.branch.module.max_len = None
    y = torch.randn(2, 3, D)
    for call in (made, made.inverse, made.forward_and_log_det):
        with pytest.raises(lf.NotCertifiable, match="seq_len=2"):
            call(y)


def test_large_bounds_under_float16_autocast_stay_invertible() -> None:
    """Issue 12: a subnormal factor was rounded up, and b(x) / x came to -0.002 with coeff 0.9."""
    parts = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for part, weight in zip(parts, (2050.0, -2050.0), strict=True):
        nn.init.constant_(part.weight, weight)
    made = lf.InvertibleResidual(nn.Sequential(*parts), 0.9)
    x = torch.tensor([2.0**-10, 2.0**-9, 2.0**-7])[:, None, None]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        ratio = made(x) / x
    # But for the rounding of the products themselves, to float16.
    assert bool((ratio >= 0.1 - 0.9 * 2.0**-10).all()), ratio


REFUSED: dict[str, Callable[[], object]] = {
    "dot-product": lambda: lf.InvertibleResidual(
        nn.MultiheadAttention(D, 2, batch_first=True), seq_len=8
    ),
    "number of tokens": lambda: lf.InvertibleResidual(lf.L2MultiheadAttention(D, 2, batch_first=True)),
    "batch_first=True, got batch_first=False": lambda: lf.InvertibleResidual(
        nn.Sequential(lf.L2MultiheadAttention(D, 2)), seq_len=8
    ),
    "causal": lambda: lf.InvertibleResidual(branch("attention"), 0.9, "causal"),
    "norm must be one of .* got 'self'": lambda: block("feed-forward", norm="self"),
    "keep the shape": lambda: lf.InvertibleResidual(nn.Linear(D, 1))(torch.randn(2, 3, D)),
    "max_len is 8, got 9": lambda: block("attention", seq_len=8)(torch.randn(2, 9, D)),
    "inplace=False": lambda: lf.InvertibleResidual(
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(D, D)), 0.3
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message: str) -> None:
    with pytest.raises((ValueError, lf.NotCertifiable), match=message):
        REFUSED[message]()


@pytest.mark.parametrize("part", [branch("attention", dropout=0.1), lf.FeedForward(D, 16, dropout=0.1)])
def test_active_dropout_is_refused(part: nn.Module) -> None:
    made, y = lf.InvertibleResidual(part), torch.randn(2, 4, D)
    with pytest.raises(RuntimeError, match=r"p=0.1.*\.eval\(\)"):
        made.inverse(y)
    made.eval().inverse(y)


def test_a_branch_that_is_contractive_already() -> None:
    made = scrambled(lf.InvertibleResidual(lf.Contractive(branch("attention"), 3.0), 0.9)).double()
    assert lf.certify(made.branch, norm=made.norm_in_use()).bound <= 0.9 * (1 + 1e-12)
    assert round_trip(made, 16, 1.0) <= 1e-11


def test_no_tokens_and_too_large_ones() -> None:
    block = lf.InvertibleResidual(lf.FeedForward(4, 8), 0.9)
    assert block.inverse(torch.zeros(2, 0, 4)).shape == (2, 0, 4)
    attention = lf.L2MultiheadAttention(4, 1, batch_first=True, causal=False, value_proj=True)
    with pytest.raises(ValueError, match="overflows torch.float32 at y"):
        lf.InvertibleResidual(attention, 0.9, seq_len=3).inverse(torch.randn(2, 3, 4) * 1e38)
    with pytest.raises(ValueError, match="causal or token-wise all the way down"):
        lf.InvertibleResidual(attention, 0.9, seq_len=3, log_det="causal")
