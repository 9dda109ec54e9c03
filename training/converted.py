"""Encoders of torch or Hugging Face as L2 language models, to fine-tune.

model = from_encoder(encoder, vocabulary="abc...")
model.save_pretrained("converted")
python -m training fit --config recipes/finetune.yaml --model.pretrained converted ...
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

import lipformer as lf
from lipformer.models import LanguageModel, LanguageModelConfig
from training.errors import BadInput


class _Layer(NamedTuple):
    attention: nn.MultiheadAttention
    norms: tuple[nn.LayerNorm, nn.LayerNorm]
    up: nn.Linear
    down: nn.Linear


@torch.no_grad()
def from_encoder(encoder: nn.Module, vocabulary: str, max_len: int = 256) -> LanguageModel:
    """A causal character model of the variant "l2" with an encoder's layers.

    Attention becomes tied L2 attention (:func:`lipformer.convert_attention`, which says what is kept);
    LayerNorms and feed-forward weights are copied. The characters' vectors and the map to logits are
    new, positions become ALiBi and the activation GELU: a start for fine-tuning, not the same function.

    Args:
        encoder: an nn.TransformerEncoder, or a BERT-type encoder of Hugging Face (its layers in
            ``encoder.encoder.layer``).
        vocabulary: the characters of the text to come, each once.
        max_len: length of training blocks.
    """
    if isinstance(encoder, nn.TransformerEncoder):
        layers = [_torch_layer(layer) for layer in encoder.layers]
        pre = bool(encoder.layers[0].norm_first)
        last = encoder.norm
    else:
        layers, pre, last = list(_bert_layers(encoder)), False, None
    first = layers[0]
    config = LanguageModelConfig(
        "l2",
        len(vocabulary),
        dim=first.attention.embed_dim,
        num_heads=first.attention.num_heads,
        num_layers=len(layers),
        hidden=first.up.out_features,
        max_len=max_len,
        norm_place="pre" if pre else "post",
        token_shift=False,  # the encoder's attention saw whole tokens
        vocabulary=vocabulary,
    )
    model = LanguageModel(config)
    attentions = [m for m in model.trunk.modules() if isinstance(m, lf.L2MultiheadAttention)]
    forwards = [m for m in model.trunk.modules() if isinstance(m, lf.FeedForward)]
    norms = [m for m in model.trunk.modules() if isinstance(m, nn.LayerNorm)]
    for i, layer in enumerate(layers):
        new = lf.convert_attention(
            layer.attention, causal=True, positions="alibi", slopes=attentions[i].slopes
        )
        attentions[i].load_state_dict(new.state_dict())
        forwards[i].get_submodule("up").load_state_dict(layer.up.state_dict())
        forwards[i].get_submodule("down").load_state_dict(layer.down.state_dict())
        for norm, theirs in zip(norms[2 * i : 2 * i + 2], layer.norms, strict=True):
            norm.load_state_dict(theirs.state_dict())
    if pre and isinstance(last, nn.LayerNorm):
        model.body.get_submodule("readout.0").load_state_dict(last.state_dict())
    return model.eval()


def _torch_layer(layer: Any) -> _Layer:
    return _Layer(layer.self_attn, (layer.norm1, layer.norm2), layer.linear1, layer.linear2)


def _bert_layers(encoder: Any) -> Iterator[_Layer]:
    try:
        for layer in encoder.encoder.layer:
            own, out = layer.attention.self, layer.attention.output
            attention = nn.MultiheadAttention(
                own.query.in_features, own.num_attention_heads, batch_first=True
            )
            linear = (own.query, own.key, own.value)
            attention.in_proj_weight.copy_(torch.cat([part.weight for part in linear]))
            attention.in_proj_bias.copy_(torch.cat([part.bias for part in linear]))
            attention.out_proj.load_state_dict(out.dense.state_dict())
            norms = (out.LayerNorm, layer.output.LayerNorm)
            yield _Layer(attention, norms, layer.intermediate.dense, layer.output.dense)
    except AttributeError as error:
        raise BadInput(
            "from_encoder takes an nn.TransformerEncoder or a BERT-type encoder of Hugging Face, got "
            f"{type(encoder).__name__}: {error}"
        ) from error
