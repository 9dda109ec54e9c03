"""functional.l2_attention against the definition in float64, which builds the N x N matrix."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lipformer.functional import debug_checks, l2_attention, l2_attention_step, l2_attention_weights
from tests.oracles import l2_attention_oracle

B, H, N, D = 2, 3, 40, 8
SLOPES = torch.tensor([0.5, 0.3, 0.07], dtype=torch.float64)  # two of them no powers of two


def tokens(n: int = N, d: int = D, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, H, n, d, dtype=torch.float64).to(dtype)


def padding(n: int = N) -> Tensor:
    """Padded at the right in one sample, at the left and inside in the other."""
    padded = torch.zeros(B, n, dtype=torch.bool)
    padded[0, n - n // 3 :] = True
    padded[1, : n // 4] = padded[1, n // 2] = True
    return padded


def dense_bias(n: int = N) -> Tensor:
    """Random, some keys hidden, never a query's own."""
    bias = torch.randn(B, H, n, n, dtype=torch.float64)
    own = torch.eye(n, dtype=torch.bool)
    hidden = (torch.rand(B, H, n, n) < 0.3) & ~own
    return bias.masked_fill(hidden, -math.inf).masked_fill(own, 0.0)


def cases(n: int = N) -> dict[str, dict[str, Any]]:
    """Every combination of masks that has a path of its own."""
    return {
        "plain": {},
        "scale": {"scale": 0.7},
        "scale per head": {"scale": torch.tensor([0.1, 1.0, 3.0])[:, None, None]},
        "padding": {"key_padding_mask": padding(n)},
        "bias": {"bias": dense_bias(n)},
        "bias of one head": {"bias": dense_bias(n)[:, :1]},
        "shared bias": {"bias": dense_bias(n)[0, 0]},
        "bias and padding": {"bias": dense_bias(n), "key_padding_mask": padding(n)},
        "causal": {"is_causal": True},
        "causal padding": {"is_causal": True, "key_padding_mask": padding(n)},
        "causal bias": {"is_causal": True, "bias": dense_bias(n)},
        "causal bias padding": {
            "is_causal": True,
            "bias": dense_bias(n),
            "key_padding_mask": padding(n),
        },
        "window": {"is_causal": True, "window": 5},
        "window of one": {"is_causal": True, "window": 1},
        "window padding": {"is_causal": True, "window": 5, "key_padding_mask": padding(n)},
        "window bias": {"is_causal": True, "window": 5, "bias": dense_bias(n)},
        "wide window": {"is_causal": True, "window": n + 3},
        "alibi": {"is_causal": True, "slopes": SLOPES},
        "alibi padding": {"is_causal": True, "slopes": SLOPES, "key_padding_mask": padding(n)},
        "alibi window": {"is_causal": True, "slopes": SLOPES, "window": 7},
        "alibi bias": {"is_causal": True, "slopes": SLOPES, "bias": dense_bias(n)},
        "all": {
            "is_causal": True,
            "slopes": SLOPES,
            "window": 9,
            "bias": dense_bias(n),
            "key_padding_mask": padding(n),
            "scale": torch.tensor([0.1, 1.0, 3.0])[:, None, None],
        },
    }


def worst(out: Tensor, want: Tensor) -> float:
    """The largest error relative to the largest output."""
    assert out.shape == want.shape
    return ((out.double() - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("size", [1e-2, 1.0, 30.0])
def test_float64(name: str, size: float) -> None:
    y, options = size * tokens(), cases()[name]
    assert worst(l2_attention(y, **options), l2_attention_oracle(y, **options)) <= 1e-12


FAR = {"first": 0, "middle": N // 2, "last": N - 1}


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("where", ["none", "offset", *FAR])
def test_float32(name: str, where: str) -> None:
    """Also with 1e3 added to every token, and with one token 1e3 away from the others."""
    y, options = tokens(dtype=torch.float32), cases()[name]
    if where == "offset":
        y = y + 1e3
    elif where in FAR:
        y[..., FAR[where], :] += 1e3
    out = l2_attention(y, **options)
    want = l2_attention_oracle(y, **options)
    assert worst(out, want) <= 2e-6
    if where in FAR:  # relative to the largest output of the tokens that are not far away
        near = torch.arange(N) != FAR[where]
        assert worst(out[..., near, :], want[..., near, :]) <= 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", cases())
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """Against the oracle on the rounded input."""
    y, options = tokens(dtype=dtype), cases()[name]
    out = l2_attention(y, **options)
    assert out.dtype == dtype
    y = y.double()
    allowed = {
        torch.bfloat16: 2e-2 * (y - y.mean(-2, keepdim=True)).abs().max(),
        torch.float16: 1e-2 * y.abs().max(),
    }
    assert (out.double() - l2_attention_oracle(y, **options)).abs().max() <= allowed[dtype]


@pytest.mark.parametrize("name", ["plain", "padding", "causal", "alibi", "window"])
def test_bfloat16_with_an_offset(name: str) -> None:
    """A bfloat16 near 100 is good to 0.25: the result can be no better than the oracle so rounded."""
    y, options = (tokens() + 100).bfloat16(), cases()[name]
    want = l2_attention_oracle(y, **options)
    out = l2_attention(y, **options).double()
    spread = (y.double() - 100).abs().max()
    ulp = (want.bfloat16().double() - want).abs().max()
    assert (out - want).abs().max() <= 2e-2 * spread + 2 * max(ulp, 0.25)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_float_types_keep_far_tokens_finite(dtype: torch.dtype) -> None:
    """Distances up to 1e6: weights are 0 or 1, and nothing overflows."""
    y = (1e6 * tokens()).to(dtype)
    for is_causal in (False, True):
        out = l2_attention(y, is_causal=is_causal)
        assert worst(out, y.double()) <= {torch.bfloat16: 1e-2}.get(dtype, 2e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_few_tokens(n: int, dtype: torch.dtype) -> None:
    """The first rows of causal attention have a path of their own."""
    y = tokens(n, dtype=dtype)
    padded = torch.zeros(B, n, dtype=torch.bool)
    padded[0, : n - 1] = True
    for options in (
        {},
        {"is_causal": True},
        {"is_causal": True, "window": 2},
        {"is_causal": True, "slopes": SLOPES},
        {"key_padding_mask": padded},
        {"is_causal": True, "key_padding_mask": padded},
        {"is_causal": True, "window": 2, "key_padding_mask": padded},
    ):
        want = l2_attention_oracle(y, **options)
        assert worst(l2_attention(y, **options), want) <= {torch.float64: 1e-12}.get(dtype, 2e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_duplicates_are_a_fixed_point(is_causal: bool) -> None:
    y = tokens(1, dtype=torch.float32).expand(B, H, 9, D) + 1e3
    assert worst(l2_attention(y, is_causal=is_causal), y.double()) <= 2e-7
    y = tokens(1).expand(B, H, 9, D).clone().requires_grad_()
    l2_attention(y, is_causal=is_causal).square().sum().backward()
    assert bool(torch.isfinite(y.grad).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_slopes_of_another_dtype(dtype: torch.dtype) -> None:
    """The slopes are taken as stored; no product with them is rounded to their dtype."""
    y, options = tokens(), {"is_causal": True, "slopes": SLOPES.to(dtype)}
    want = l2_attention_oracle(y, **options)
    assert worst(l2_attention(y, **options), want) <= 1e-12
    assert worst(l2_attention_weights(y, **options) @ y, want) <= 1e-12


@pytest.mark.parametrize("n", [63, 64, 65, 127, 128, 129, 130, 300])
@pytest.mark.parametrize("window", [1, 2, 17, 63, 64, 65, 128, 129])
def test_window_blocks(n: int, window: int) -> None:
    """Around the edges of the blocks that the window is cut into."""
    y = tokens(n, 2)
    for options in ({}, {"slopes": SLOPES, "key_padding_mask": padding(n)}):
        options = {"is_causal": True, "window": window, **options}
        assert worst(l2_attention(y, **options), l2_attention_oracle(y, **options)) <= 1e-12


@pytest.mark.parametrize("name", ["plain", "causal", "padding", "alibi", "causal bias padding"])
def test_three_hundred_tokens(name: str) -> None:
    y, options = tokens(300, 4), cases(300)[name]
    assert worst(l2_attention(y, **options), l2_attention_oracle(y, **options)) <= 1e-12
    assert worst(l2_attention(y.float(), **options), l2_attention_oracle(y.float(), **options)) <= 2e-6


@pytest.mark.parametrize("shape", [(3, 9, 4), (2, 3, 9, 4), (2, 2, 3, 9, 4), (1, 2, 2, 3, 9, 5)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    y = torch.randn(shape, dtype=torch.float64)
    padded = torch.zeros(*shape[:-3], 9, dtype=torch.bool)
    padded[..., -2:] = True
    for bias in (None, dense_bias(9)[0], dense_bias(9)[0, 0]):
        options = {"key_padding_mask": padded, "bias": bias}
        assert worst(l2_attention(y, **options), l2_attention_oracle(y, **options)) <= 1e-12


@pytest.mark.parametrize("name", ["plain", "padding", "causal", "window", "alibi", "all"])
def test_weights(name: str) -> None:
    """l2_attention_weights is the P of the output."""
    y, options = tokens(), cases()[name]
    weights = l2_attention_weights(y, **options)
    assert worst(weights @ y, l2_attention_oracle(y, **options)) <= 1e-12
    assert weights.shape == (B, H, N, N)


@pytest.mark.parametrize("name", ["causal", "causal padding", "window", "alibi", "alibi window"])
@pytest.mark.parametrize("queries", [1, 2, 3, N - 2, N])
def test_last_rows(name: str, queries: int) -> None:
    y, options = tokens(), dict(cases()[name])
    want = l2_attention_oracle(y, **options)[..., -queries:, :]
    del options["is_causal"]
    assert worst(l2_attention_step(y, queries, **options), want) <= 1e-12


def test_math_and_fused_backends_agree() -> None:
    y, options = tokens(), cases()["alibi padding"]
    with sdpa_kernel(SDPBackend.MATH):
        math_out = l2_attention(y, **options)
    assert worst(l2_attention(y, **options), math_out) <= 1e-13


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"y": torch.randn(2, 0, 2)}, r"at least one token .* \(2, 0, 2\)"),
    "window alone": ({"window": 2}, "with is_causal=True .* got window=2"),
    "window zero": ({"window": 0, "is_causal": True}, "at least 1 .* got window=0"),
    "window float": ({"window": 2.5, "is_causal": True}, "an integer.* got window=2.5"),
    "slopes alone": ({"slopes": torch.ones(2)}, "slopes .* need is_causal=True"),
    "slopes sign": ({"slopes": -torch.ones(2), "is_causal": True}, r">= 0, .* got tensor\(\[-1"),
    "scale": ({"scale": 0.0}, "scale must be positive, .* got 0.0"),
    "scale tensor": ({"scale": -torch.ones(2, 1, 1)}, "scale must be positive, .* got tensor"),
    "bias dtype": ({"bias": torch.ones(4, 4).bool()}, "floating point, .* torch.bool"),
    "own key": (
        {"bias": torch.zeros(4, 4).fill_diagonal_(-math.inf)},
        "query 0's own key .* every token must be allowed to attend to itself",
    ),
    "own key, one value": ({"bias": torch.full((1, 1), -math.inf)}, "query 0's own key"),
    "own key undefined": ({"bias": torch.full((4, 4), math.nan)}, "own key .* nan"),
    "padding": ({"key_padding_mask": torch.zeros(3).bool()}, r"= \(4,\), got torch.bool \(3,\)"),
    "padding value": ({"key_padding_mask": torch.ones(4)}, "only 0 and -inf, got 1.0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        l2_attention(**{"y": torch.randn(2, 4, 2), **options})


def test_debug_checks() -> None:
    y = torch.full((1, 3, 2), math.nan)
    l2_attention(y)
    with debug_checks(), pytest.raises(ValueError, match="must be finite .* 6 non-finite of 6"):
        l2_attention(y)
    with debug_checks(), debug_checks(False):
        l2_attention(y)
    with pytest.raises(ValueError, match=r"queries must be in 1..N = 3, got 4"):
        l2_attention_step(y, 4)
