"""Causal branches: inverted token by token, robustly, in bulk and from the cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.certificate import Ask, Bound
from lipformer.flows import NotConverged
from lipformer.flows.solve.causal import solve_causal
from tests.flows.blocks import branch
from tests.layers.battery import error, scrambled

F64 = torch.float64
B, T, D = 3, 24, 6


class Triangular:
    """f(x)_i = c Q_i x_i + squash(sum_j<i A_ij x_j): own gain c, any gain across."""

    def __init__(self, c: float, gain: float, squash: float | None, tokens: int = T) -> None:
        own = torch.linalg.qr(torch.randn(tokens, D, D, dtype=F64))[0]
        below = torch.ones(tokens, tokens, dtype=F64).tril(-1)[:, :, None, None]
        self.own = c * own
        self.across = gain * below * torch.randn(tokens, tokens, D, D, dtype=F64) / (D * tokens) ** 0.5
        self.squash = squash
        self.calls = 0

    def __call__(self, x: Tensor, index: Tensor) -> Tensor:
        self.calls += 1
        across = torch.einsum("ijde,bje->bid", self.across, x)
        if self.squash is not None:
            across = self.squash * torch.tanh(across)
        return torch.einsum("ide,bie->bid", self.own, x) + across

    def solve(self, y: Tensor) -> Tensor:
        """Token by token, each by its own linear system."""
        x = torch.zeros_like(y)
        eye = torch.eye(D, dtype=F64)
        for i in range(y.shape[1]):
            rest = y[:, i] - (self(x, torch.arange(len(y)))[:, i] - x[:, i] @ self.own[i].T)
            x[:, i] = torch.linalg.solve(eye + self.own[i], rest.mT).mT
        return x


@pytest.mark.parametrize("accelerate", [True, False, None])
@pytest.mark.parametrize(("gain", "squash"), [(0.3, None), (1.0, None), (30.0, 10.0), (1e4, 100.0)])
def test_large_gains_across_tokens(gain: float, squash: float | None, accelerate: bool) -> None:
    f = Triangular(0.9, gain, squash, tokens=12)
    y = torch.randn(B, 12, D, dtype=F64)
    x, record = solve_causal(f, y, rate=0.9, tol=1e-10, accelerate=accelerate)
    residual = (x + f(x, torch.arange(B)) - y).norm(dim=-1)
    limit = 1e-10 * y.abs().amax((1, 2)).clamp_min(1.0)
    assert bool((residual / 0.1 <= record.token_error).all())
    assert bool((residual / 0.1 <= limit[:, None] * (1 + 1e-6) + 1e-12 * x.abs().max()).all())
    torch.testing.assert_close(record.error_bound, record.token_error.amax(1))
    if squash is None:
        torch.testing.assert_close(x, f.solve(y), rtol=1e-6, atol=1e-7)


def test_parallel_iteration_alone_would_run_off() -> None:
    """Negative control: the map of the test above, iterated without locks."""
    f = Triangular(0.9, 30.0, None)
    y = x = torch.randn(B, T, D, dtype=F64)
    for _ in range(150):
        x = y - f(x, torch.arange(B))
    assert not bool((x + f(x, torch.arange(B)) - y).abs().max() < 1.0)


def test_the_promise_of_a_token_given_the_earlier_ones() -> None:
    f = Triangular(0.9, 2.0, 10.0)
    y = torch.randn(B, T, D, dtype=F64)
    x, record = solve_causal(f, y, rate=0.9, tol=1e-2)
    eye = torch.eye(D, dtype=F64)
    rest = y - (f(x, torch.arange(B)) - torch.einsum("ide,bie->bid", f.own, x))
    best = torch.linalg.solve(eye + f.own, rest.unsqueeze(-1)).squeeze(-1)
    errors = (x - best).norm(dim=-1)
    assert float(errors.max()) > 1e-6, "a coarse tolerance leaves errors to judge"
    assert bool((errors <= record.token_error).all())


def test_samples_do_not_depend_on_each_other() -> None:
    f = Triangular(0.9, 3.0, 10.0)
    y = torch.randn(4, T, D, dtype=F64) * torch.tensor([1e-3, 1.0, 10.0, 1e3], dtype=F64)[:, None, None]
    x, record = solve_causal(f, y, rate=0.9, tol=1e-9)
    for k in range(4):
        alone, single = solve_causal(f, y[k : k + 1], rate=0.9, tol=1e-9)
        assert error(alone[0], x[k]) <= 1e-7
        assert abs(single.iterations - int(record.evaluations[k])) <= 0.2 * single.iterations


def test_a_branch_that_is_not_causal_is_found_out() -> None:
    f = Triangular(0.5, 0.2, None)
    f.across = f.across.transpose(0, 1).contiguous()
    with pytest.raises((ValueError, NotConverged)):
        solve_causal(f, torch.randn(B, T, D, dtype=F64), rate=0.5, tol=1e-9, max_iter=100)


def test_no_convergence_and_empty_batches() -> None:
    f = Triangular(0.97, 1.0, None)
    y = torch.randn(B, T, D, dtype=F64)
    with pytest.raises(NotConverged, match="residual") as caught:
        solve_causal(f, y, rate=0.97, max_iter=3, accelerate=False)
    assert not caught.value.record.converged
    x, record = solve_causal(f, y[:0], rate=0.97)
    assert x.shape == (0, T, D)
    assert record.converged
    with pytest.raises(ValueError, match="1 NaN or infinite"):
        solve_causal(
            f, y.index_fill(0, torch.tensor([0]), 0.0).masked_fill_(y == y[1, 2, 3], torch.nan), rate=0.9
        )


def block(name: str, mode: str = "causal") -> lf.InvertibleResidual:
    """With random weights in float64, causal in either mode."""
    torch.manual_seed(1)
    return scrambled(lf.InvertibleResidual(branch(name, causal=True), 0.9, mode)).double().eval()


NAMES = ("attention", "rotary window", "alibi", "feed-forward", "sequence")


@pytest.mark.parametrize("mode", ["causal", "norm"])
@pytest.mark.parametrize("name", NAMES)
def test_streaming_agrees_with_the_whole(name: str, mode: str) -> None:
    made = block(name, mode)
    x = torch.randn(B, 20, 8, dtype=F64)
    with torch.no_grad():
        y = made(x)
        whole = made.inverse(y, tol=1e-13)
    for sizes in ([1] * 20, [5, 1, 1, 13]):
        cache, rows, outs, forth = None, [], [], None
        with torch.no_grad(), lf.frozen(made):
            for part in y.split(sizes, dim=1):
                row, cache = made.inverse_step(part, cache, tol=1e-13)
                rows.append(row)
                out, forth = made.step(row, forth)
                outs.append(out)
        assert error(torch.cat(rows, 1), whole) <= 1e-10
        assert error(torch.cat(rows, 1), x) <= 1e-10
        assert error(torch.cat(outs, 1), y) <= 1e-10


def test_tokens_are_solved_together() -> None:
    """In half the evaluations that it takes in turn, to the same point."""
    f = Triangular(0.6, 0.3, None)
    y = torch.randn(B, T, D, dtype=F64)
    (x, together), (in_turn, record) = (
        solve_causal(f, y, rate=0.6, tol=1e-9, accelerate=flag) for flag in (None, True)
    )
    assert error(x, in_turn) <= 1e-6
    assert together.iterations <= 0.6 * record.iterations


def test_streaming_evaluates_the_new_tokens_only() -> None:
    made = block("attention")
    seen: list[int] = []
    inner = made.branch.module
    step = type(inner).step

    class Counting(type(inner)):  # type: ignore[misc]
        def step(self, x: Tensor, *rest: object, **options: object) -> object:
            seen.append(x.shape[1])
            return step(self, x, *rest, **options)

    inner.__class__ = Counting
    y = torch.randn(B, 20, 8, dtype=F64)
    _, cache = made.inverse_step(y[:, :19])
    seen.clear()
    made.inverse_step(y[:, 19:], cache)
    assert set(seen) == {1}


def test_streaming_with_padding() -> None:
    made = block("sequence")
    x = torch.randn(B, 12, 8, dtype=F64)
    padding = torch.zeros(B, 12, dtype=torch.bool)
    padding[0, :3] = padding[2, :1] = True
    y = made(x, padding).detach()
    cache, rows = None, []
    for part, mask in zip(y.split(2, 1), padding.split(2, 1), strict=True):
        row, cache = made.inverse_step(part, cache, mask, tol=1e-13)
        rows.append(row)
    assert error(torch.cat(rows, 1), x) <= 1e-10


def test_causal_mode_shrinks_less() -> None:
    """The point of the mode: the same weights keep a larger part of their branch."""
    own, whole = (block("attention", mode) for mode in ("causal", "norm"))
    whole.load_state_dict(own.state_dict())
    with torch.no_grad():
        assert float(own.branch.scales().min()) > 1.5 * float(whole.branch.scales().max())


class Exploding(nn.Module):
    """Each token adds the exponential of the one before: overflows within a few tokens."""

    causal = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        return self.weight * (before.abs().exp() - x)


@lf.register_bound(Exploding)
def _(module: Exploding, ask: Ask) -> Bound:
    return Bound(module.weight.abs(), "own token")


def test_an_overflow_does_not_pass_for_convergence() -> None:
    block = lf.InvertibleResidual(Exploding(), 0.9, "causal")
    with pytest.raises(NotConverged):
        block.inverse(3.0 * torch.randn(2, 6, 3, dtype=torch.float64), max_iter=50)
