"""AttentionMaps agree with the layers that they describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.analysis import (
    AttentionMaps,
    attention_maps,
    ball_bound,
    local_bound,
    lofast_bound,
    mean_field_bound,
    probe_attention,
)


def layer(heads: int = 4, bias: bool = True) -> nn.MultiheadAttention:
    made = nn.MultiheadAttention(12, heads, bias=bias, batch_first=True, dtype=torch.float64)
    for parameter in made.parameters():
        nn.init.normal_(parameter)  # torch starts with zero biases
    return made.requires_grad_(False)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_torch_layer(heads: int, bias: bool) -> None:
    attention, x = layer(heads, bias), torch.randn(3, 7, 12, dtype=torch.float64)
    maps = attention_maps(attention)
    expected, weights = attention(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(maps(x), expected)
    torch.testing.assert_close(maps.weights(x), weights)


def test_masks_combine() -> None:
    attention, x = layer(), torch.randn(3, 7, 12, dtype=torch.float64)
    maps = attention_maps(attention)
    lower = torch.ones(7, 7, dtype=torch.bool).tril()
    pads = torch.zeros(3, 7, dtype=torch.bool)
    pads[1, 5:] = True
    expected = attention(x, x, x, attn_mask=~lower, key_padding_mask=pads)[0]
    causal = AttentionMaps(maps.logits, maps.values, maps.offset, maps.constant, causal=True)
    torch.testing.assert_close(causal(x, ~pads[:, None, None, :]), expected)
    torch.testing.assert_close(maps(x, lower & ~pads[:, None, None, :]), expected)


def test_the_query_bias_matters() -> None:
    maps, x = attention_maps(layer()), torch.randn(2, 5, 12, dtype=torch.float64)
    without = AttentionMaps(maps.logits, maps.values, None, maps.constant)
    assert (without(x) - maps(x)).abs().max() > 1e-2


def test_maps_are_differentiable_in_the_weights() -> None:
    attention = layer().requires_grad_(True)
    attention_maps(attention)(torch.randn(2, 5, 12, dtype=torch.float64)).sum().backward()
    assert attention.in_proj_weight.grad is not None
    assert float(attention.in_proj_weight.grad.abs().max()) > 0


@pytest.mark.parametrize(
    ("other", "pointer"),
    [
        (lf.L2MultiheadAttention(4, 2), "which has a global constant: lf.certify"),
        (nn.TransformerEncoderLayer(4, 2, 8), "give its attention, layer.self_attn"),
        (nn.Sequential(nn.Linear(4, 4)), r"one of probe_attention\(model, tokens\), or use layer_gains"),
    ],
)
def test_an_error_points_on(other: nn.Module, pointer: str) -> None:
    with pytest.raises(TypeError, match=f"got {type(other).__name__}.*{pointer}"):
        ball_bound(other, 3, 1.0)


def test_a_probe_is_a_layer_too() -> None:
    model, x = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), torch.randn(5, 4)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    (plain,) = probe_attention(model, x)
    assert ball_bound(plain, 5, 1.0) == ball_bound(model.self_attn, 5, 1.0)
    (causal,) = probe_attention(model, x, forward=lambda y: model(y, src_mask=~seen))
    assert attention_maps(causal).causal
    torch.testing.assert_close(attention_maps(causal)(x), causal(x))
    window = seen.triu(-1)
    (masked,) = probe_attention(model, x, forward=lambda y: model(y, src_mask=~window))
    with pytest.raises(ValueError, match=r"self_attn was called with a mask: give probe\.maps\(\)"):
        attention_maps(masked)
    (bent,) = probe_attention(model, x, forward=lambda y: model(y, src_mask=torch.randn(5, 5)))
    with pytest.raises(ValueError, match="self_attn has no AttentionMaps"):
        attention_maps(bent)


class Products(nn.Module):
    """A user's own layer of one head, whose method multiplies weights in whatever dtype they have."""

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        q, k, v = layer.in_proj_weight.detach().chunk(3)
        self.q, self.k, self.v = nn.Parameter(q), nn.Parameter(k), nn.Parameter(v)
        self.o = nn.Parameter(layer.out_proj.weight.detach())

    def attention_maps(self) -> AttentionMaps:
        scale = self.q.shape[0] ** -0.5
        return AttentionMaps(scale * (self.q.mT @ self.k)[None], (self.v.mT @ self.o.mT)[None])

    def forward(self, x: Tensor) -> Tensor:
        return self.attention_maps()(x)


def cancelling() -> nn.MultiheadAttention:
    """One head with V O = -2^-46 2^60 in one entry; the product in float32 is zero."""
    layer, u = nn.MultiheadAttention(2, 1, bias=False, batch_first=True), 2.0**-23
    with torch.no_grad():
        layer.in_proj_weight.zero_()
        layer.in_proj_weight[4:, 0] = torch.tensor([1 + u, -1.0])
        layer.out_proj.weight.copy_(torch.tensor([[1 - u, 1.0], [0.0, 0.0]]) * 2.0**60)
    return layer.requires_grad_(False)


BOUNDS: dict[str, Callable[[Any, Tensor], float]] = {
    "ball_bound": lambda layer, x: ball_bound(layer, len(x), float(x.abs().max()) * x.shape[1]),
    "mean_field_bound": lambda layer, x: mean_field_bound(layer, float(x.abs().max()) * x.shape[1]),
    "local_bound": lambda layer, x: local_bound(layer, x).item(),
    "lofast_bound": lambda layer, x: float(lofast_bound(layer, x, 1e-3)) / 1e-3,
}


@pytest.mark.parametrize("route", ["layer", "maps", "own method", "probe"])
@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_are_those_of_the_stored_weights(name: str, route: str) -> None:
    layer, x = cancelling(), torch.zeros(1, 2)
    v = layer.in_proj_weight[4:].double()
    gain = float(torch.linalg.matrix_norm(v.mT @ layer.out_proj.weight.double().mT, ord=2))
    assert gain == 2.0**14
    assert not bool((layer.in_proj_weight[4:].mT @ layer.out_proj.weight.mT).any())  # what is guarded
    routes: dict[str, Callable[[], Any]] = {
        "layer": lambda: layer,
        "maps": lambda: attention_maps(layer),
        "own method": lambda: Products(layer).requires_grad_(False),
        "probe": lambda: probe_attention(layer, x)[0].maps(),
    }
    assert gain <= BOUNDS[name](routes[route](), x) <= 1.001 * gain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_token_of_a_narrow_layer_does_not_exceed_its_bounds(dtype: torch.dtype) -> None:
    # With one token the layer is linear and local_bound has no slack but its rounding.
    for _ in range(20):
        layer = nn.MultiheadAttention(8, 1, batch_first=True, dtype=dtype).requires_grad_(False)
        value, out = layer.in_proj_weight.double().chunk(3)[2], layer.out_proj.weight.double()
        gain, x = float(torch.linalg.matrix_norm(out @ value, ord=2)), torch.randn(1, 8, dtype=dtype)
        for bound in BOUNDS.values():
            assert bound(layer, x) >= gain * (1 - 1e-14)
        assert float(local_bound(layer, x.double())) <= gain * (1 + 1e-6)


def test_the_own_method_keeps_gradients_and_weights() -> None:
    layer = Products(nn.MultiheadAttention(4, 1))
    before = {name: (id(p), p.dtype) for name, p in layer.named_parameters()}
    local_bound(layer, torch.randn(3, 4)).backward()
    assert {name: (id(p), p.dtype) for name, p in layer.named_parameters()} == before
    assert all(p.grad is not None and bool(p.grad.any()) for p in layer.parameters())


def test_maps_compute_in_the_dtype_of_the_tokens() -> None:
    layer, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(3, 4)
    maps = attention_maps(layer)
    assert maps.logits.dtype == torch.float64
    torch.testing.assert_close(maps(x), layer(x, x, x)[0])
    assert maps(x.double()).dtype == torch.float64


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("where", ["in_proj_weight", "in_proj_bias", "out_proj.weight"])
def test_bounds_refuse_weights_that_are_not_finite(name: str, where: str) -> None:
    layer = nn.MultiheadAttention(4, 2, batch_first=True).requires_grad_(False)
    layer.get_parameter(where).flatten()[0] = torch.nan
    with pytest.raises(ValueError, match=r"the \w+ of attention must be finite, got \d+ of"):
        BOUNDS[name](layer, torch.ones(3, 4))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("name", [*BOUNDS, "plain"])
def test_bounds_that_overflow_are_infinite_or_exact(name: str, zero: bool) -> None:
    bounds: dict[str, Any] = {
        **BOUNDS,
        "plain": lambda layer, x: float(lofast_bound(layer, x, 1e200, refined=False)),
    }
    eye = torch.eye(2, dtype=torch.float64)[None]
    x = torch.full((3, 2), 1e200, dtype=torch.float64)
    found = bounds[name](AttentionMaps(eye, 0 * eye if zero else eye), x)
    assert found == torch.inf or (zero and found >= 0.0)
