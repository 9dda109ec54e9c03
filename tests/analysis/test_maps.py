"""AttentionMaps agree with the layers that they describe."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lipformer as lf
from lipformer.analysis import AttentionMaps, attention_maps, ball_bound, probe_attention


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


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="got Linear"):
        attention_maps(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="kdim=3"):
        attention_maps(nn.MultiheadAttention(4, 2, kdim=3))
    with pytest.raises(ValueError, match="add_zero_attn=True"):
        attention_maps(nn.MultiheadAttention(4, 2, add_zero_attn=True))
    with pytest.raises(ValueError, match=r"logits must be \(H, D, D\), got \(2, 3, 4\)"):
        AttentionMaps(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match=r"got \(2, 5, 4\)"):
        AttentionMaps(torch.zeros(2, 3, 3), torch.zeros(2, 5, 4))
    with pytest.raises(ValueError, match=r"offset must be \(2, 3\), got \(3,\)"):
        AttentionMaps(torch.zeros(2, 3, 3), torch.zeros(2, 3, 4), torch.zeros(3))
    with pytest.raises(TypeError, match=r"mask must be bool .* got torch.float32"):
        attention_maps(nn.MultiheadAttention(4, 2)).weights(torch.zeros(3, 4), torch.zeros(3, 3))


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
