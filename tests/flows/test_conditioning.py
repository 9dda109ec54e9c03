"""What records promise, against inverses in extended precision, with the branch's conditioning swept."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import lipformer as lf
from lipformer.flows import InvertibleResidual, NotConverged, solve_fixed_point
from lipformer.flows.solve.causal import solve_causal
from lipformer.flows.solve.norms import l2_size
from lipformer.flows.solve.rounding import evaluate_widely
from lipformer.functional.wide import DISTURBANCE
from tests.flows.blocks import block

Array = np.ndarray
Map = Callable[[Array], Array]
D, HEADS = 4, 2
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
EXTENDED = np.finfo(np.longdouble).eps < 1e-18  # else it is float64, no reference for itself


def exactly(x: Tensor) -> Array:
    return x.detach().double().numpy().astype(np.longdouble)


class Multiplied(TorchFunctionMode):
    """Notes what a block multiplies its tokens by: weights and biases, and the factor behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear: list[tuple[Array, Array]] = []
        self.factor = np.longdouble(1.0)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is F.linear:
            _, weight, bias = (*args, *(kwargs or {}).values())
            self.linear.append(
                (exactly(weight), exactly(weight.new_zeros(()) if bias is None else bias))
            )
        elif func.__name__ in ("mul", "__mul__", "__rmul__") and out.ndim == 3 and len(self.linear) > 1:
            self.factor *= next(exactly(a) for a in args if isinstance(a, Tensor) and a.ndim == 0)
        return out


def reference(block: InvertibleResidual, y: Tensor, kind: str, causal: bool) -> Map:
    """The branch (B, T, D) -> (B, T, D) in extended precision, by its definition."""
    with torch.no_grad(), Multiplied() as seen:
        block.branch(y)

    def layer(x: Array, k: int) -> Array:
        weight, bias = seen.linear[k]
        return x @ weight.T + bias

    def chain(x: Array) -> Array:
        x = layer(layer(x, 0), 1)
        return (layer(np.tanh(x), 2) if kind == "tanh" else x) * seen.factor

    def attention(x: Array) -> Array:
        weight, _ = seen.linear[0]
        keys = (x @ weight.T).reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2)
        logits = -0.5 * ((keys[:, :, :, None] - keys[:, :, None]) ** 2).sum(-1)
        if causal:
            logits = np.where(np.tri(x.shape[1], dtype=bool), logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        heads = (weights / weights.sum(-1, keepdims=True)) @ keys
        return layer(heads.swapaxes(1, 2).reshape(x.shape), 1)

    return attention if kind == "attention" else chain


def root(g: Map, x: Array) -> Array:
    """The zero near x of a map of vectors (m, n) -> (m, n), by Newton's method."""
    n = x.size
    step = 1e-6 * (1.0 + np.abs(x).max())
    for _ in range(12):
        value = g(x[None])[0]
        slopes = (g(x + step * np.eye(n)) - value) / step
        x = x - np.linalg.solve(slopes.T.astype(np.float64), value.astype(np.float64))
    return x


def solution(f: Map, y: Array, x: Array, causal: bool) -> Array:
    """Of x + f(x) = y for one event (T, D); if causal each token's, given the earlier ones in x."""
    if not causal:
        return root(lambda z: z + f(z.reshape(-1, *x.shape)).reshape(z.shape) - y.ravel(), x.ravel())
    found = np.zeros_like(x)
    for i in range(len(x)):

        def g(token: Array, i: int = i) -> Array:
            event = np.repeat(x[None], len(token), 0)
            event[:, i] = token
            return token + f(event)[:, i] - y[i]

        found[i] = root(g, x[i])
    return found


def sizes(error: Array, norm: str) -> Array:
    """Of one event's error (T, D): of all, or in mode "causal" of each token."""
    tokens = np.sqrt((error**2).sum(-1))
    whole = {"l2": np.sqrt((error**2).sum()), "token": tokens.max(), "linf": np.abs(error).max()}
    return tokens if norm == "self" else whole[norm]


def branch(kind: str, causal: bool, bias: float) -> nn.Module:
    """Attention, or linear layers of which the second takes back the large bias of the first."""
    if kind == "attention":
        return lf.L2MultiheadAttention(D, HEADS, batch_first=True, causal=causal, max_len=8)
    first, second = nn.Linear(D, D), nn.Linear(D, D)
    with torch.no_grad():
        first.bias.copy_(bias * torch.randn(D))
        second.bias.copy_(-(second.weight.double() @ first.bias.double()))
    return nn.Sequential(first, second, *([nn.Tanh(), nn.Linear(D, D)] if kind == "tanh" else []))


def outcome(seed: int) -> str:
    """One inverse, drawn by its seed: "met", "limit" or "refused"; fails where the promise is broken."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kind, dtype = draw.choice(("linear", "tanh", "attention")), DTYPES[seed % 4]
    causal, norm = draw.choice(((True, None), (False, "l2"), (False, "token"), (False, "linf")))
    narrow = dtype == torch.float16
    bias = 10.0 ** draw.uniform(0.0, 4.0 if narrow else draw.choice((8.0, 8.0, 8.0, 16.0)))
    size = 10.0 ** draw.uniform(-3.0, 2.0 if narrow else 3.0)
    coeff, tol = draw.choice((0.1, 0.5, 0.9, 0.99)), draw.choice((1e-2, 1e-4, 1e-6, 1e-9, 0.0))
    made = InvertibleResidual(
        branch(kind, causal, bias), coeff, "causal" if causal else "norm", norm=norm, seq_len=8
    )
    made = made.to(dtype).eval()
    tokens = draw.randint(1, 6)
    y = size * torch.randn(2, tokens, D)
    if draw.random() < 0.5:  # two clusters, far from each other beside their width
        y = size * torch.randn(2, tokens, 1).sign() + 10.0 ** draw.uniform(-4.0, 0.0) * y
    y = y.to(dtype)
    try:
        x, record = made.inverse_with_record(y, tol=tol, max_iter=300)
    except (NotConverged, ValueError):
        return "refused"
    f = reference(made, y, kind, causal)
    for k in range(2):
        exact = solution(f, exactly(y[k]), exactly(x[k]), causal).reshape(tokens, D)
        error = sizes(exactly(x[k]) - exact, made.norm_in_use())
        promised = record.token_error[k] if causal else record.error_bound[k]
        what = f"seed {seed}: {kind}, {dtype}, {norm}, {coeff=}, {bias=:.1e}, {size=:.1e}, {tol=}"
        assert (error <= promised.numpy()).all(), f"{what}: error {error}, promised {promised}"
        if record.met_tolerance:
            assert (error <= tol * max(1.0, float(y[k].abs().max()))).all(), what
    return "met" if record.met_tolerance else "limit"


def outcomes(seeds: range) -> Counter[str]:
    found = Counter(outcome(seed) for seed in seeds if EXTENDED or DTYPES[seed % 4] != torch.float64)
    print(f"seeds {seeds.start} to {seeds.stop - 1}:", dict(found))
    return found


def test_sixty_inverses_keep_their_promises() -> None:
    assert outcomes(range(60))["met"] >= 15


@pytest.mark.slow
def test_a_thousand_inverses_keep_their_promises() -> None:
    assert outcomes(range(1000, 2000))["met"] >= 250


def test_a_branch_that_cannot_be_evaluated_in_float64_promises_nothing() -> None:
    y = torch.randn(2, 3, D)

    def rounding(x: Tensor, index: Tensor) -> Tensor:
        out = torch.empty(x.shape)
        out[:] = 0.5 * x
        return out

    def leaving(x: Tensor, index: Tensor) -> Tensor:
        return torch.from_numpy(0.5 * x.numpy().astype(np.float32)) + 0.0 * x

    solves = (solve_causal, partial(solve_fixed_point, measure=l2_size))
    for solve, branch in itertools.product(solves, (rounding, leaving)):
        x, record = solve(branch, y, rate=0.5)
        torch.testing.assert_close(x, y / 1.5)
        assert record.converged
        assert not record.met_tolerance
        assert bool(torch.isinf(record.error_bound).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["sequence", "rotary window", "alibi"])
def test_the_second_evaluation_is_of_the_same_weights(form: str, dtype: torch.dtype) -> None:
    """Whatever is derived from weights alone is what the first evaluation multiplies by."""
    made = block(form, 0.9, "causal").to(dtype)
    x = torch.randn(2, 6, 8).to(dtype)
    with torch.no_grad():
        with Multiplied() as first:
            own = made.branch(x)
        with Multiplied() as second:
            wide = evaluate_widely(made.branch, x)
    assert wide is not None
    assert wide.dtype == torch.float64
    assert len(first.linear) == len(second.linear) >= 2
    for mine, others in zip(first.linear, second.linear, strict=True):
        for one, other in zip(mine, others, strict=True):
            assert np.abs(one - other).max() <= 2 * DISTURBANCE * np.abs(one).max()
    assert float((wide - own.double()).abs().max()) <= 20 * torch.finfo(dtype).eps
