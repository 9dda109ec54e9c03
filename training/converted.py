"""Models to fine-tune: encoders of torch or Hugging Face as L2 language models, further characters.

model = from_encoder(encoder, vocabulary="abc...")
model.save_pretrained("converted")
python -m training fit --config recipes/finetune.yaml --model.pretrained converted ...
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

import lipformer as lf
from lipformer.models import LanguageModel, LanguageModelConfig
from training.errors import BadInput


class _Layer(NamedTuple):
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
    try:
        converted: Any = lf.convert_attention(
            copy.deepcopy(encoder), causal=True, positions="alibi"
        ).model
        if isinstance(converted, nn.TransformerEncoder):
            layers = [_torch_layer(layer) for layer in converted.layers]
            pre, last = bool(converted.layers[0].norm_first), converted.norm
        else:
            layers = [_bert_layer(layer) for layer in converted.encoder.layer]
            pre, last = False, None
    except (AttributeError, ValueError) as error:
        raise BadInput(
            "from_encoder takes an nn.TransformerEncoder or a BERT-type encoder of Hugging Face, got "
            f"{type(encoder).__name__}: {error}"
        ) from error
    theirs = _attentions(converted)
    config = LanguageModelConfig(
        "l2",
        len(vocabulary),
        dim=theirs[0].embed_dim,
        num_heads=theirs[0].num_heads,
        num_layers=len(layers),
        hidden=layers[0].up.out_features,
        max_len=max_len,
        norm_place="pre" if pre else "post",
        token_shift=False,  # the encoder's attention saw whole tokens
        vocabulary=vocabulary,
    )
    model = LanguageModel(config)
    forwards = [m for m in model.trunk.modules() if isinstance(m, lf.FeedForward)]
    norms = [m for m in model.trunk.modules() if isinstance(m, nn.LayerNorm)]
    for own, attention in zip(_attentions(model.trunk), theirs, strict=True):
        own.load_state_dict(attention.state_dict())
    for i, layer in enumerate(layers):
        forwards[i].get_submodule("up").load_state_dict(layer.up.state_dict())
        forwards[i].get_submodule("down").load_state_dict(layer.down.state_dict())
        for norm, given in zip(norms[2 * i : 2 * i + 2], layer.norms, strict=True):
            norm.load_state_dict(given.state_dict())
    if pre and isinstance(last, nn.LayerNorm):
        model.body.get_submodule("readout.0").load_state_dict(last.state_dict())
    return model.eval()


@torch.no_grad()
def with_vocabulary(model: LanguageModel, vocabulary: str) -> LanguageModel:
    """Returns a model that also knows the characters that a vocabulary adds to its own.

    They have new rows in the embedding, drawn with the mean and spread of each feature of the others,
    and in the readout, the mean of the others: as likely as a character of average weight. All else is
    the model's, and certified as it was; the readout's constant is that of the larger matrix.

    Args:
        model: with a vocabulary of its own.
        vocabulary: begins with the model's.
    """
    own = model.config.vocabulary
    if own is None or not vocabulary.startswith(own):
        raise ValueError(f"the vocabulary must begin with the model's {own!r}, got {vocabulary!r}")
    if own == vocabulary:
        return model
    larger = LanguageModel(replace(model.config, vocab_size=len(vocabulary), vocabulary=vocabulary))
    weights = model.state_dict()
    for name, new in larger.state_dict().items():
        if new.shape != weights[name].shape:
            rows = weights[name]
            added = rows.mean(0, keepdim=True).repeat(len(new) - len(rows), *[1] * (rows.ndim - 1))
            if name == "embedding.weight" and len(rows) > 1:
                added += rows.std(0) * torch.randn_like(added)
            weights[name] = torch.cat([rows, added])
    larger.load_state_dict(weights)
    return larger.train(model.training)


def _attentions(model: nn.Module) -> list[lf.L2MultiheadAttention]:
    return [m for m in model.modules() if isinstance(m, lf.L2MultiheadAttention)]


def _torch_layer(layer: Any) -> _Layer:
    return _Layer((layer.norm1, layer.norm2), layer.linear1, layer.linear2)


def _bert_layer(layer: Any) -> _Layer:
    norms = (layer.attention.output.LayerNorm, layer.output.LayerNorm)
    return _Layer(norms, layer.intermediate.dense, layer.output.dense)
