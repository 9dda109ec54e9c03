"""Encoders of others as language models to fine-tune."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

import lipformer as lf
from training.converted import from_encoder, with_vocabulary
from training.errors import BadInput


def torch_encoder(norm_first: bool) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 4, 24, 0.0, F.gelu, batch_first=True, norm_first=norm_first)
    last = nn.LayerNorm(16) if norm_first else None
    encoder = nn.TransformerEncoder(layer, 2, last, enable_nested_tensor=False)
    for p in encoder.parameters():
        nn.init.normal_(p, std=0.3)
    return encoder


def bert(encoder: nn.TransformerEncoder) -> hf.BertModel:
    """The same post-norm layers in Hugging Face's BERT."""
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 5}
    model = hf.BertModel(hf.BertConfig(num_hidden_layers=2, layer_norm_eps=1e-5, **sizes))
    for theirs, layer in zip(model.encoder.layer, encoder.layers, strict=True):
        mha, own = layer.self_attn, theirs.attention.self
        for i, part in enumerate((own.query, own.key, own.value)):
            weight, bias = mha.in_proj_weight.chunk(3)[i], mha.in_proj_bias.chunk(3)[i]
            part.load_state_dict({"weight": weight, "bias": bias})
        for part, same in (
            (theirs.attention.output.dense, mha.out_proj),
            (theirs.attention.output.LayerNorm, layer.norm1),
            (theirs.intermediate.dense, layer.linear1),
            (theirs.output.dense, layer.linear2),
            (theirs.output.LayerNorm, layer.norm2),
        ):
            part.load_state_dict(same.state_dict())
    return model


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_trunk_is_the_converted_encoder(norm_first: bool) -> None:
    encoder = torch_encoder(norm_first)
    model = from_encoder(encoder, "abcde", max_len=8)
    assert model(torch.tensor([[0, 1, 2]])).shape == (1, 3, 5)
    attention = next(m for m in model.modules() if isinstance(m, lf.L2MultiheadAttention))
    options = {"causal": True, "positions": "alibi", "slopes": attention.slopes}
    plain = lf.convert_attention(encoder, **options).model.eval()
    x = torch.randn(2, 8, 16)
    expected = x
    for layer in plain.layers:
        if norm_first:
            expected = expected + layer.self_attn(layer.norm1(expected), need_weights=False)[0]
            hidden = F.gelu(layer.linear1(layer.norm2(expected)))
            expected = expected + layer.linear2(hidden)
        else:
            expected = layer.norm1(expected + layer.self_attn(expected, need_weights=False)[0])
            expected = layer.norm2(expected + layer.linear2(F.gelu(layer.linear1(expected))))
    torch.testing.assert_close(model.hidden(x), expected)


def test_a_bert_is_taken_by_its_parts() -> None:
    encoder = torch_encoder(False)
    x = torch.randn(2, 8, 16)
    ours = from_encoder(bert(encoder), "abcde").hidden(x)
    torch.testing.assert_close(ours, from_encoder(encoder, "abcde").hidden(x))


def test_what_is_no_encoder_is_refused() -> None:
    with pytest.raises(BadInput, match="takes an nn.TransformerEncoder or a BERT-type.* got Linear"):
        from_encoder(nn.Linear(3, 3), "ab")


@pytest.mark.parametrize("variant", ["l2", "invertible", "lipschitz"])
def test_further_characters_leave_the_others_as_they_were(variant: str) -> None:
    model = lf.models.VARIANTS[variant](4, dim=8, num_heads=2, num_layers=1, vocabulary="abcd")
    model.initialize(torch.tensor([[0, 1, 2, 3]]))
    with torch.no_grad():
        model.embedding.weight.mul_(0.3).add_(5.0)
    larger = with_vocabulary(model.eval(), "abcdxyz")
    tokens = torch.tensor([[3, 0, 1, 1, 2]])
    new, old = larger(tokens), model(tokens)
    torch.testing.assert_close(new[..., :4], old, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(new[..., 4:], old.mean(-1, keepdim=True).expand(1, 5, 3))
    added = larger.embedding.weight[4:]
    assert len(added.unique(dim=0)) == 3
    assert (added - 5.0).abs().max() < 2.0
    x = torch.randn(1, 6, 8)
    assert lf.estimate_lipschitz(larger.body, x).value <= lf.certify(larger).bound
    assert with_vocabulary(model, "abcd") is model
    with pytest.raises(ValueError, match="must begin with the model's 'abcd', got 'abxd'"):
        with_vocabulary(model, "abxd")
