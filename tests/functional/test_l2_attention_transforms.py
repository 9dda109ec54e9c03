"""Derivatives of l2_attention, torch.func, compile, export, autocast and dropout."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from lipformer.functional import l2_attention, l2_attention_weights
from tests.oracles import l2_attention_oracle

H, N, D = 2, 7, 3


def tokens(*lead: int, n: int = N) -> Tensor:
    return torch.randn(*lead, H, n, D, dtype=torch.float64)


def padding(n: int = N) -> Tensor:
    padded = torch.zeros(n, dtype=torch.bool)
    padded[1] = padded[-1] = True
    return padded


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "padding": {"key_padding_mask": padding()},
    "causal padding": {"is_causal": True, "key_padding_mask": padding()},
    "window": {"is_causal": True, "window": 3},
    "alibi": {"is_causal": True, "slopes": torch.tensor([0.5, 0.3], dtype=torch.float64)},
}


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name: str) -> None:
    scale = torch.tensor([0.4, 1.3], dtype=torch.float64)[:, None, None]

    def fn(y: Tensor, scale: Tensor) -> Tensor:
        return l2_attention(y, scale=scale, **CASES[name])

    assert torch.autograd.gradcheck(fn, (tokens().requires_grad_(), scale.requires_grad_()))


@pytest.mark.parametrize("padded", [[0, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 1, 1]])
def test_gradients_with_few_valid_tokens(padded: list[int]) -> None:
    mask = torch.tensor([padded], dtype=torch.bool)
    y = torch.randn(1, 1, len(padded), 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: l2_attention(z, is_causal=True, key_padding_mask=mask), y)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradcheck_of_bias_and_slopes(is_causal: bool) -> None:
    bias = torch.randn(H, N, N, dtype=torch.float64)

    def fn(y: Tensor, bias: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return l2_attention(y, bias=bias, is_causal=is_causal)

    assert torch.autograd.gradcheck(fn, (tokens().requires_grad_(), bias.requires_grad_()))


@pytest.mark.parametrize("name", CASES)
def test_gradgradcheck_on_the_math_backend(name: str) -> None:
    def fn(y: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return l2_attention(y, **CASES[name])

    assert torch.autograd.gradgradcheck(fn, (tokens(n=N).requires_grad_(),))


# jacrev runs a batch of backward passes through the fused kernel: torch says that it is slow.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_forward_mode(name: str) -> None:
    """torch.func.jvp, forward_ad and jacfwd, without any context, against the dense Jacobian."""
    y, v = tokens(), torch.randn(H, N, D, dtype=torch.float64)

    fn = partial(l2_attention, **CASES[name])
    dense = torch.autograd.functional.jacobian(lambda y: l2_attention_oracle(y, **CASES[name]), y)
    want = torch.einsum("abcdef,def->abc", dense, v)
    torch.testing.assert_close(torch.func.jvp(fn, (y,), (v,))[1], want, rtol=0, atol=1e-12)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(fn(forward_ad.make_dual(y, v)))
    torch.testing.assert_close(dual.tangent, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.func.jacfwd(fn)(y), dense, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.func.jacrev(fn)(y), dense, rtol=0, atol=1e-12)


# So it says of the backward of a window's blocks.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_vmap_and_nested_grad(name: str) -> None:
    y = tokens(4)

    fn = partial(l2_attention, **CASES[name])
    want = torch.stack([fn(one) for one in y])
    torch.testing.assert_close(torch.func.vmap(fn)(y), want, rtol=0, atol=1e-12)

    def energy(y: Tensor) -> Tensor:
        return fn(y).square().sum()

    each = torch.func.vmap(torch.func.grad(energy))(y)
    leaf = y.clone().requires_grad_()
    (want,) = torch.autograd.grad(sum(energy(one) for one in leaf), leaf)
    torch.testing.assert_close(each, want, rtol=0, atol=1e-12)
    hessian = torch.func.hessian(lambda row: energy(torch.cat([row, y[0, :, 1:]], 1)))(y[0, :, :1])
    flat = hessian.reshape(H * D, H * D)
    torch.testing.assert_close(flat, flat.T, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_compile(name: str) -> None:
    y = tokens(2)

    def fn(y: Tensor) -> Tensor:
        return l2_attention(y, **batched(CASES[name], 2))

    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    results = []
    for run in (fn, compiled):
        leaf = y.clone().requires_grad_()
        out = run(leaf)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaf)))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def batched(options: dict[str, Any], batch: int) -> dict[str, Any]:
    """The options for so many samples: a padding mask has a row for each."""
    return {k: v.expand(batch, N) if k == "key_padding_mask" else v for k, v in options.items()}


class Attend(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options

    def forward(self, y: Tensor) -> Tensor:
        return l2_attention(y, **self.options)


@pytest.mark.parametrize("name", CASES)
def test_export(name: str) -> None:
    y, options = tokens(2), batched(CASES[name], 2)
    program = torch.export.export(Attend(options), (y,))
    torch.testing.assert_close(program.module()(y), l2_attention(y, **options), rtol=0, atol=1e-12)


# A window is exported for one N only: torch cannot prove its blocks to fit for every N.
@pytest.mark.parametrize("name", ["plain", "causal", "alibi"])
def test_export_for_any_number_of_tokens(name: str) -> None:
    n = torch.export.Dim("n", min=6, max=512)
    program = torch.export.export(Attend(CASES[name]), (tokens(2, n=20),), dynamic_shapes=({2: n},))
    for length in (6, 20, 65, 130):
        y = tokens(2, n=length)
        want = l2_attention(y, **CASES[name])
        torch.testing.assert_close(program.module()(y), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_autocast(name: str, dtype: torch.dtype) -> None:
    """The kernel runs in the low precision, and the offset is taken off before that."""
    y = (tokens().float() + 50).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        out = l2_attention(y, **CASES[name])
    assert out.dtype == dtype
    want = l2_attention_oracle(y, **CASES[name])
    ulp = 0.25 if dtype == torch.bfloat16 else 0.04  # of a number near 50
    assert (out.double() - want).abs().max().item() <= 2e-2 * 4 + ulp
    out.float().sum().backward()
    assert bool(torch.isfinite(y.grad).all())
    with torch.autocast("cpu", dtype=dtype):
        assert l2_attention(y.double(), **CASES[name]).dtype == torch.float64


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_that_float16_holds_does_not_overflow(name: str) -> None:
    """Scaled up as a loss scaler does: no unit of the norm columns may enlarge it on its way."""
    y = tokens(n=N).half()
    weight = 2000.0 * torch.randn_like(y)
    gradients = []
    for fn, leaf in ((l2_attention, y.clone()), (l2_attention_oracle, y.double())):
        leaf.requires_grad_()
        out = fn(leaf, **CASES[name])
        gradients.append(torch.autograd.grad((weight.to(out.dtype) * out).sum(), leaf)[0].double())
    got, want = gradients
    assert (got - want).abs().max().item() <= 1e-2 * want.abs().max().item()


DROPOUT = {name: CASES[name] for name in ("plain", "causal", "window", "causal padding")}


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_is_unbiased(name: str, offset: float) -> None:
    """The mean over draws of (P dropped) y is P y, within five standard errors."""
    y, draws = tokens() + offset, 1500
    out = l2_attention(y.expand(draws, H, N, D), dropout_p=0.3, **batched(DROPOUT[name], draws))
    error = out.std(0) / math.sqrt(draws)
    want = l2_attention_oracle(y, **DROPOUT[name])
    assert bool(((out.mean(0) - want).abs() <= 5 * error + 1e-12).all())
    assert bool((out[0] != want).any())


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_drops_weights(name: str) -> None:
    """Each row is a sum of P_ij y_j / (1 - p) over some of the keys, also far from the origin.

    Every one of the 2^5 sums that a row may be is formed; the row must be one of them.
    """
    p, n = 0.5, 5
    options = dict(DROPOUT[name])
    if "key_padding_mask" in options:
        options["key_padding_mask"] = padding(n)
    y = 100.0 + torch.tensor([0.0, 0.31, 0.72, 1.33, 1.94], dtype=torch.float64).reshape(1, n, 1)
    weights = l2_attention_weights(y, scale=1.0, **options)[0]
    subsets = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * n)
    possible = (subsets[None] * weights[:, None]) @ y[0, :, 0] / (1 - p)  # (n, 2^n)
    for _ in range(20):
        rows = l2_attention(y, dropout_p=p, scale=1.0, **options)[0, :, 0]
        gap = (possible - rows[:, None]).abs().amin(-1)
        assert gap.max().item() <= 1e-9


def test_dropout_of_zero_draws_nothing() -> None:
    y = tokens()
    state = torch.get_rng_state()
    l2_attention(y, dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), state)
