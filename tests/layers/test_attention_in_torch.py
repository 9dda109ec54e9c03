"""L2 attention inside nn.TransformerEncoderLayer and nn.TransformerEncoder, in every mode.

Torch has an inference path that computes dot-product attention from the weights it finds. It must
never run: the output in eval mode, with or without no_grad, is that of train mode without dropout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from tests.layers.battery import error

B, N, D, H = 3, 6, 8, 2
# Said when an encoder is built around a layer that its fast path would not take.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")


def l2_attention(layer: nn.TransformerEncoderLayer, **options: Any) -> lf.L2MultiheadAttention:
    options = {"batch_first": layer.self_attn.batch_first, "value_proj": True, **options}
    attention = lf.L2MultiheadAttention(D, H, **options)
    with torch.no_grad():
        attention.q_proj.weight.normal_()  # the small initial one would hide differences
    return attention


def encoder_layer(batch_first: bool = True, **options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(D, H, 16, dropout=0.0, batch_first=batch_first, **options)


def encoder(swap: str, batch_first: bool = True, **options: Any) -> nn.TransformerEncoder:
    """Two layers with L2 attention, put in before or after the encoder is built."""
    layer = encoder_layer(batch_first, **options)
    if swap == "before":
        layer.self_attn = l2_attention(layer)
    built = nn.TransformerEncoder(layer, 2)
    if swap == "after":
        for part in built.layers:
            part.self_attn = l2_attention(part)
    return built


def by_hand(layer: nn.TransformerEncoderLayer, x: Tensor, **masks: Any) -> Tensor:
    """The layer's definition, through attention's own forward."""

    def attend(x: Tensor) -> Tensor:
        return layer.self_attn(x, need_weights=False, **masks)[0]

    def feed_forward(x: Tensor) -> Tensor:
        return layer.linear2(layer.activation(layer.linear1(x)))

    if layer.norm_first:
        x = x + attend(layer.norm1(x))
        return x + feed_forward(layer.norm2(x))
    x = layer.norm1(x + attend(x))
    return layer.norm2(x + feed_forward(x))


def modes(model: nn.Module, *args: Any, **masks: Any) -> Iterator[Tensor]:
    """The output in eval mode, as inference runs it."""
    model.eval()
    for context in (contextlib.nullcontext(), torch.no_grad(), torch.inference_mode()):
        with context:
            yield model(*args, **masks)


def padding() -> Tensor:
    padded = torch.zeros(B, N, dtype=torch.bool)
    padded[0, 4:] = padded[2, 1:] = True
    return padded


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"src_key_padding_mask": padding()},
    "float padding": {"src_key_padding_mask": torch.zeros(B, N).masked_fill(padding(), -torch.inf)},
    "causal": {"mask": nn.Transformer.generate_square_subsequent_mask(N)},
    "causal hint": {"mask": nn.Transformer.generate_square_subsequent_mask(N), "is_causal": True},
    "padding and causal": {
        "src_key_padding_mask": torch.zeros(B, N).masked_fill(padding(), -torch.inf),
        "mask": nn.Transformer.generate_square_subsequent_mask(N),
    },
}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_encoder_layer(name: str, norm_first: bool) -> None:
    layer = encoder_layer(norm_first=norm_first)
    layer.self_attn = l2_attention(layer)
    masks = dict(MASKS[name])
    if "mask" in masks:
        masks["src_mask"] = masks.pop("mask")
    x = torch.randn(B, N, D)
    expected = by_hand(
        layer,
        x,
        key_padding_mask=masks.get("src_key_padding_mask"),
        attn_mask=masks.get("src_mask"),
    )
    assert error(layer.train()(x, **masks), expected) < 1e-6
    for out in modes(layer, x, **masks):
        assert error(out, expected) < 1e-6


@pytest.mark.parametrize("swap", ["before", "after"])
@pytest.mark.parametrize("name", MASKS)
def test_encoder(name: str, swap: str) -> None:
    model, masks = encoder(swap), MASKS[name]
    x = torch.randn(B, N, D)
    expected = model.train()(x, **masks)
    valid = ~padding() if "src_key_padding_mask" in masks else torch.ones(B, N, dtype=torch.bool)
    for out in modes(model, x, **masks):
        assert error(out[valid], expected[valid]) < 1e-6
        if "src_key_padding_mask" in masks and "mask" not in masks:
            alone = model(x[:1, :4])
            assert error(out[:1, :4], alone) < 1e-6  # as if the padded tokens were not there


@pytest.mark.parametrize("swap", ["before", "after"])
def test_encoder_tokens_first(swap: str) -> None:
    model = encoder(swap, batch_first=False)
    x = torch.randn(N, B, D)
    expected = model.train()(x, src_key_padding_mask=padding())
    for out in modes(model, x, src_key_padding_mask=padding()):
        assert error(out, expected) < 1e-6


def test_encoder_without_a_batch() -> None:
    model, x = encoder("before"), torch.randn(N, D)
    assert error(model.eval()(x), model.train()(x[None])[0]) < 1e-6


def calls_in_eval(model: nn.Module, cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> int:
    """How often inference calls a class's forward (a hook would itself keep torch off its path)."""
    calls = []
    forward = cls.forward

    def counting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", counting)
    with torch.no_grad():
        model.eval()(torch.randn(B, N, D), src_key_padding_mask=padding())
    return len(calls)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_every_forward_is_called_in_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with dot-product attention torch does skip it."""
    plain = nn.TransformerEncoder(encoder_layer(), 2)
    assert calls_in_eval(plain, nn.MultiheadAttention, monkeypatch) == 0
    for swap in ("before", "after"):
        assert calls_in_eval(encoder(swap), lf.L2MultiheadAttention, monkeypatch) == 2
        monkeypatch.undo()


def test_another_mask_is_refused_inside_the_encoder() -> None:
    model = encoder("before").eval()
    banded = torch.ones(N, N, dtype=torch.bool).triu(2)
    with pytest.raises(ValueError, match="any_mask=True"):
        model(torch.randn(B, N, D), mask=banded)


def test_certificate_of_an_encoder() -> None:
    model = encoder("before", norm_first=True).eval()
    certificate = lf.certify(model, seq_len=N)
    assert certificate.kind == "TransformerEncoder"
    text = str(certificate)
    for path in ("layers.0.self_attn", "layers.1.norm2", "layers.1.linear1"):
        assert path in text
    with pytest.raises(lf.NotCertifiable, match=r"'layers.0.self_attn' \(MultiheadAttention\)"):
        lf.certify(nn.TransformerEncoder(encoder_layer(), 1).eval())
