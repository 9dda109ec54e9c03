"""Decoding token by token through any causal composition gives the rows of the full pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.layers import step_module
from lipformer.layers.branch import call_branch
from lipformer.layers.decoding import select_cache
from tests.layers.battery import error, scrambled

B, N, D = 3, 9, 8


def attention(**options: object) -> lf.L2MultiheadAttention:
    return lf.L2MultiheadAttention(
        D, 2, batch_first=True, causal=True, max_len=N, value_proj=True, **options
    )


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
    "attention": attention,
    "feed-forward": lambda: lf.FeedForward(D, 16),
    "residual": lambda: lf.Residual(attention(window=3)),
    "convex": lambda: lf.ConvexResidual(lf.FeedForward(D, 16), 0.3),
    "contractive": lambda: lf.Contractive(attention(), 0.9),
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


@pytest.mark.parametrize("baked", [False, True], ids=["", "baked"])
@pytest.mark.parametrize("name", MODULES)
def test_steps_equal_the_full_pass(name: str, baked: bool) -> None:
    module = scrambled(MODULES[name]()).double().eval()
    module = lf.bake(module) if baked else module
    x = torch.randn(B, N, D, dtype=torch.float64)
    full = call_branch(module, x)
    for sizes in ([1] * N, [4, 1, 1, 3], [N]):
        assert error(decode(module, x, sizes), full) <= 1e-12
    if hasattr(module, "step"):
        assert error(module.step(x)[0], full) <= 1e-12


@pytest.mark.parametrize("name", MODULES)
def test_padded_steps_equal_the_full_pass(name: str) -> None:
    module = scrambled(MODULES[name]()).double().eval()
    x = torch.randn(B, N, D, dtype=torch.float64)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1, :3] = padding[2, :1] = True
    full = call_branch(module, x, padding)
    out = decode(module, x, [2, 1, 1, 5], padding)
    assert error(out[~padding], full[~padding]) <= 1e-12


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
    plain = lf.L2MultiheadAttention(D, 2, batch_first=True, max_len=N, value_proj=True)
    with pytest.raises(ValueError, match="causal=True, got None"):
        step_module(plain, x)
    with pytest.raises(TypeError, match="tuple of 2 caches"):
        step_module(nn.Sequential(nn.Tanh(), nn.Tanh()), x, (None,))
