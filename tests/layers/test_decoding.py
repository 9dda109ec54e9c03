"""Step-by-step decoding gives the rows of the full pass, from a cache of keys alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lipformer as lf
from tests.layers.battery import error, scrambled

B, N, D, H = 2, 11, 8, 2
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
FORMS: dict[str, dict[str, Any]] = {
    "paper": {"value_proj": True, "causal": True},
    "lean": {"value_proj": False, "causal": True},
    "window": {"value_proj": False, "causal": True, "window": 3},
    "window of one": {"value_proj": True, "causal": True, "window": 1},
    "alibi": {"value_proj": False, "causal": True, "positions": "alibi"},
    "alibi and window": {"value_proj": True, "causal": True, "positions": "alibi", "window": 4},
    "rotary": {"value_proj": True, "causal": True, "positions": "rotary"},
    "rotary and window": {"value_proj": False, "causal": True, "positions": "rotary", "window": 5},
}
# One token at a time; a prompt, then one at a time; chunks of several sizes; all at once.
CHUNKS: dict[str, list[int]] = {
    "ones": [1] * N,
    "prompt": [7, *[1] * 4],
    "chunks": [2, 3, 1, 5],
    "all": [N],
}


def made(name: str, dtype: torch.dtype, **options: Any) -> lf.L2MultiheadAttention:
    layer = lf.L2MultiheadAttention(D, H, batch_first=True, dtype=dtype, **FORMS[name], **options)
    scrambled(layer)
    return layer.eval()


def decode(
    layer: lf.L2MultiheadAttention | lf.Contractive,
    x: Tensor,
    chunks: list[int],
    padding: Tensor | None = None,
) -> Tensor:
    cache, rows, start = None, [], 0
    for size in chunks:
        part = slice(start, start + size)
        mask = None if padding is None else padding[:, part]
        row, cache = layer.step(x[:, part], cache, mask)
        rows.append(row)
        start += size
    assert cache is not None
    assert cache.seen == start
    return torch.cat(rows, dim=1)


def left_padding() -> Tensor:
    padded = torch.zeros(B, N, dtype=torch.bool)
    padded[1, :4] = True
    return padded


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", FORMS)
def test_steps_equal_the_full_pass(name: str, chunks: str, dtype: torch.dtype) -> None:
    layer, x = made(name, dtype), torch.randn(B, N, D, dtype=dtype)
    assert error(decode(layer, x, CHUNKS[chunks]), layer(x)[0]) <= TOLERANCE[dtype]
    padded = left_padding()
    x = torch.where(padded[..., None], torch.nan, x)
    full = layer(x, key_padding_mask=padded)[0]
    assert error(decode(layer, x, CHUNKS[chunks], padded), full) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("norm", [None, "l2", "self"])
@pytest.mark.parametrize("name", ["paper", "alibi and window", "rotary"])
def test_contractive_steps(name: str, norm: str | None, dtype: torch.dtype) -> None:
    layer = lf.Contractive(made(name, dtype), norm=norm, seq_len=N)
    x, padded = torch.randn(B, N, D, dtype=dtype), left_padding()
    for chunks in CHUNKS.values():
        assert error(decode(layer, x, chunks), layer(x)) <= TOLERANCE[dtype]
        full = layer(x, key_padding_mask=padded)
        assert error(decode(layer, x, chunks, padded), full) <= TOLERANCE[dtype]
    with lf.frozen(layer):
        assert error(decode(layer, x, CHUNKS["ones"]), layer(x)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_tokens_of_any_size_and_offset(size: float, offset: float) -> None:
    layer = made("lean", torch.float32)
    x = size * torch.randn(B, N, D) + offset
    for chunks in CHUNKS.values():
        assert error(decode(layer, x, chunks), layer(x)[0]) <= 2e-6


def test_a_layer_called_either_way() -> None:
    """causal=None: steps are the rows of the causal call."""
    layer = scrambled(lf.L2MultiheadAttention(D, H, batch_first=True, value_proj=True))
    x = torch.randn(B, N, D)
    assert error(decode(layer, x, CHUNKS["chunks"]), layer(x, is_causal=True)[0]) <= 1e-6


def test_tokens_first() -> None:
    layer = scrambled(lf.L2MultiheadAttention(D, H, causal=True, value_proj=True))
    x = torch.randn(N, B, D)
    cache, rows = None, []
    for token in x.split(1):
        row, cache = layer.step(token, cache)
        assert row.shape == (1, B, D)
        rows.append(row)
    assert error(torch.cat(rows), layer(x)[0]) <= 1e-6


def test_the_cache_holds_keys_only() -> None:
    layer = made("lean", torch.float32)
    _, cache = layer.step(torch.randn(B, 5, D))
    assert isinstance(cache, lf.layers.KeyCache)
    assert cache.keys.shape == (B, H, 5, D // H)
    assert cache.padding is None
    _, cache = layer.step(torch.randn(B, 1, D), cache)
    assert cache.keys.shape == (B, H, 6, D // H)


@pytest.mark.parametrize("window", [1, 3])
def test_the_cache_of_a_window_stays_small(window: int) -> None:
    layer = scrambled(
        lf.L2MultiheadAttention(D, H, batch_first=True, causal=True, window=window, value_proj=True)
    )
    cache, padded = None, left_padding()
    for k in range(N):
        _, cache = layer.step(torch.randn(B, 1, D), cache, padded[:, k : k + 1])
        assert cache.keys.shape[-2] == min(k + 1, window - 1)
        assert cache.padding.shape == (B, cache.keys.shape[-2])
        assert cache.seen == k + 1


def test_a_padding_mask_may_begin_or_end_later() -> None:
    """Steps without a mask are steps of valid tokens."""
    layer, x = made("lean", torch.float32), torch.randn(B, 4, D)
    padded = torch.tensor([[True, False], [False, False]])
    first, cache = layer.step(x[:, :2], None, padded)
    second, _ = layer.step(x[:, 2:], cache)
    full = layer(x, key_padding_mask=torch.cat([padded, torch.zeros_like(padded)], 1))[0]
    assert error(torch.cat([first, second], 1), full) <= 1e-6


def test_bad_steps_are_named() -> None:
    x = torch.randn(B, 3, D)
    with pytest.raises(ValueError, match="decoding is causal, but the layer has causal=False"):
        lf.L2MultiheadAttention(D, H, batch_first=True, causal=False, value_proj=True).step(x)
    layer = lf.L2MultiheadAttention(D, H, batch_first=True, causal=True, max_len=4, value_proj=True)
    _, cache = layer.step(x)
    with pytest.raises(ValueError, match="max_len is 4, got 3 tokens in the cache and 2 new"):
        layer.step(x[:, :2], cache)
    with pytest.raises(
        ValueError, match="the cache holds a batch of 2, the new tokens are a batch of 1"
    ):
        layer.step(x[:1, :1], cache)


def test_a_contractive_layer_that_does_not_mask_has_no_steps() -> None:
    """Its forward pass sees later tokens, so rows step by step could not be the same."""
    for causal in (None, False):
        layer = lf.L2MultiheadAttention(D, H, batch_first=True, causal=causal, value_proj=True)
        with pytest.raises(ValueError, match="causal"):
            lf.Contractive(layer, seq_len=N).step(torch.randn(B, 1, D))
