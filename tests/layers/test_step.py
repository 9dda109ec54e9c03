"""Decoding token by token through any causal composition gives the rows of the full pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.layers import step_module
from lipformer.layers.branch import call_branch
from lipformer.layers.decoding import select_cache
from tests.layers.battery import error, scrambled

B, N, D, H = 3, 11, 8, 2
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
# One token at a time; a prompt, then one at a time; chunks of several sizes; all at once.
CHUNKS = ([1] * N, [7, *[1] * 4], [2, 3, 1, 5], [N])
FORMS: dict[str, dict[str, Any]] = {
    "paper": {},
    "lean": {"value_proj": False},
    "window": {"value_proj": False, "window": 3},
    "window of one": {"window": 1},
    "alibi": {"value_proj": False, "positions": "alibi"},
    "alibi and window": {"positions": "alibi", "window": 4},
    "rotary": {"positions": "rotary"},
    "rotary and window": {"value_proj": False, "positions": "rotary", "window": 5},
}


def attention(**options: Any) -> lf.L2MultiheadAttention:
    given = {"batch_first": True, "causal": True, "max_len": N, "value_proj": True, **options}
    return lf.L2MultiheadAttention(D, H, **given)


class Halve(nn.Module):
    token_wise = True

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).expand_as(x)


def shared() -> nn.Module:
    layer = attention()
    return nn.Sequential(layer, nn.Tanh(), layer)


MODULES: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(attention, **form) for name, form in FORMS.items()},
    **{
        f"contractive {name}, {norm}": lambda form=FORMS[name], norm=norm: lf.Contractive(
            attention(**form), norm=norm
        )
        for name in ("paper", "alibi and window", "rotary")
        for norm in (None, "l2", "self")
    },
    "feed-forward": lambda: lf.FeedForward(D, 16),
    "residual": lambda: lf.Residual(attention(window=3)),
    "convex": lambda: lf.ConvexResidual(lf.FeedForward(D, 16), 0.3),
    "contractive sequence": lambda: lf.Contractive(
        nn.Sequential(attention(positions="rotary"), lf.FeedForward(D, 16), attention()), 0.9
    ),
    "nested": lambda: nn.Sequential(
        lf.Residual(lf.Contractive(attention(positions="alibi"), 0.5)),
        lf.CenterNorm(D),
        nn.Sequential(nn.LayerNorm(D), lf.ConvexResidual(nn.Sequential(nn.Linear(D, D), nn.GELU()))),
        lf.InvertibleResidual(attention(), 0.9, "causal"),
        Halve(),
        lf.MaxMin(),
    ),
    "one module twice": shared,
}


def decode(module: nn.Module, x: Tensor, sizes: list[int], padding: Tensor | None = None) -> Tensor:
    cache, rows, start = None, [], 0
    for size in sizes:
        part = slice(start, start + size)
        mask = None if padding is None else padding[:, part]
        row, cache = step_module(module, x[:, part], cache, mask)
        rows.append(row)
        start += size
    return torch.cat(rows, dim=1)


def left_padding() -> Tensor:
    padded = torch.zeros(B, N, dtype=torch.bool)
    padded[1, :4] = padded[2, :1] = True
    return padded


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_steps_equal_the_full_pass(name: str, dtype: torch.dtype) -> None:
    """With padding too, whatever it holds; baked; and frozen."""
    module = scrambled(MODULES[name]()).to(dtype).eval()
    x, padding = torch.randn(B, N, D, dtype=dtype), left_padding()
    holes = x.masked_fill(padding[..., None], torch.nan)
    for made in (module, lf.bake(module)):
        full, padded = call_branch(made, x), call_branch(made, holes, padding)[~padding]
        for sizes in CHUNKS:
            assert error(decode(made, x, sizes), full) <= TOLERANCE[dtype]
            assert error(decode(made, holes, sizes, padding)[~padding], padded) <= TOLERANCE[dtype]
        if hasattr(made, "step"):
            assert error(made.step(x)[0], full) <= TOLERANCE[dtype]
    with lf.frozen(module):
        assert error(decode(module, x, CHUNKS[0]), call_branch(module, x)) <= TOLERANCE[dtype]


def test_a_step_leaves_the_old_cache_as_it_was() -> None:
    module = scrambled(MODULES["nested"]()).double().eval()
    x = torch.randn(B, N, D, dtype=torch.float64)
    _, cache = step_module(module, x[:, :4], None)
    first, _ = step_module(module, x[:, 4:5], cache)
    step_module(module, 100 * x[:, 5:], cache)
    again, _ = step_module(module, x[:, 4:5], cache)
    assert torch.equal(first, again)


def test_caches_of_some_samples() -> None:
    module = scrambled(MODULES["nested"]()).double().eval()
    x = torch.randn(B, N, D, dtype=torch.float64)
    _, cache = step_module(module, x[:, :4], None)
    all_rows, _ = step_module(module, x[:, 4:], cache)
    index = torch.tensor([2, 0])
    rows, _ = step_module(module, x[index, 4:], select_cache(cache, index))
    torch.testing.assert_close(rows, all_rows[index])


def test_what_cannot_be_decoded_is_named() -> None:
    x = torch.randn(B, N, D)
    with pytest.raises(TypeError, match="Mean has no step"):
        step_module(nn.Sequential(nn.Linear(D, D), Mean()), x)
    with pytest.raises(TypeError, match="Mean has no step"):
        lf.Residual(Mean()).step(x)
    with pytest.raises(TypeError, match="LayerNorm has no step"):
        step_module(nn.LayerNorm((N, D)), x)

    class Louder(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).cumsum(1)

    with pytest.raises(TypeError, match="Louder has no step"):
        step_module(Louder(D, D), x)
    with pytest.raises(ValueError, match="causal=True, got None"):
        step_module(attention(causal=None), x)
    with pytest.raises(TypeError, match="tuple of 2 caches"):
        step_module(nn.Sequential(nn.Tanh(), nn.Tanh()), x, (None,))


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_tokens_of_any_size_and_offset(size: float, offset: float) -> None:
    layer, x = scrambled(attention(value_proj=False)).eval(), size * torch.randn(B, N, D) + offset
    for chunks in CHUNKS:
        assert error(decode(layer, x, chunks), layer(x)[0]) <= 2e-6


def test_a_layer_called_either_way() -> None:
    """causal=None: steps are the rows of the causal call."""
    layer, x = scrambled(attention(causal=None)), torch.randn(B, N, D)
    first, cache = layer.step(x[:, :4])
    second, _ = layer.step(x[:, 4:], cache)
    assert error(torch.cat([first, second], 1), layer(x, is_causal=True)[0]) <= 1e-6


def test_tokens_first() -> None:
    layer, x = scrambled(attention(batch_first=False)), torch.randn(N, B, D)
    cache, rows = None, []
    for token in x.split(1):
        row, cache = layer.step(token, cache)
        assert row.shape == (1, B, D)
        rows.append(row)
    assert error(torch.cat(rows), layer(x)[0]) <= 1e-6


def test_the_cache_holds_keys_only() -> None:
    layer = attention()
    _, cache = layer.step(torch.randn(B, 5, D))
    assert isinstance(cache, lf.layers.KeyCache)
    assert cache.keys.shape == (B, H, 5, D // H)
    assert cache.padding is None
    _, cache = layer.step(torch.randn(B, 1, D), cache)
    assert cache.keys.shape == (B, H, 6, D // H)


@pytest.mark.parametrize("window", [1, 3])
def test_the_cache_of_a_window_stays_small(window: int) -> None:
    layer, cache, padded = attention(window=window), None, left_padding()
    for k in range(N):
        _, cache = layer.step(torch.randn(B, 1, D), cache, padded[:, k : k + 1])
        assert cache.keys.shape[-2] == min(k + 1, window - 1)
        assert cache.padding.shape == (B, cache.keys.shape[-2])
        assert cache.seen == k + 1


def test_a_padding_mask_may_begin_or_end_later() -> None:
    """Steps without a mask are steps of valid tokens."""
    layer, x = scrambled(attention(value_proj=False)).eval(), torch.randn(B, 4, D)
    padded = torch.tensor([[True, False], [False, False], [False, False]])
    first, cache = layer.step(x[:, :2], None, padded)
    second, _ = layer.step(x[:, 2:], cache)
    full = layer(x, key_padding_mask=torch.cat([padded, torch.zeros_like(padded)], 1))[0]
    assert error(torch.cat([first, second], 1), full) <= 1e-6


def test_bad_steps_are_named() -> None:
    x = torch.randn(B, 3, D)
    with pytest.raises(ValueError, match="decoding is causal, but the layer has causal=False"):
        attention(causal=False).step(x)
    layer = attention(max_len=4)
    _, cache = layer.step(x)
    with pytest.raises(ValueError, match="max_len is 4, got 3 tokens in the cache and 2 new"):
        layer.step(x[:, :2], cache)
    with pytest.raises(
        ValueError, match="the cache holds a batch of 3, the new tokens are a batch of 1"
    ):
        layer.step(x[:1, :1], cache)


def test_a_contractive_layer_that_does_not_mask_has_no_steps() -> None:
    """Its forward pass sees later tokens, so rows step by step could not be the same."""
    for causal in (None, False):
        with pytest.raises(ValueError, match="causal"):
            lf.Contractive(attention(causal=causal)).step(torch.randn(B, 1, D))


@pytest.mark.parametrize("module", [nn.PReLU(), nn.Softmax(dim=-1)], ids=str)
def test_a_token_wise_module_of_torch_steps(module: nn.Module) -> None:
    x = torch.randn(B, N, D)
    assert torch.equal(decode(module, x, CHUNKS[0]), module(x))
