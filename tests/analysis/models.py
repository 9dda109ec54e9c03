"""Small models with weights large enough for attention to be uneven."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

VOCABULARY = 50
KINDS = ("bert", "roberta", "distilbert", "gpt2", "bert-decoder")


def spread(model: Any, std: float = 0.3) -> Any:
    """The model with all weights, biases too, drawn anew; in training mode, with dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in model.parameters():
            # LayerNorm's gains stay near one.
            drawn = std * torch.randn_like(parameter)
            parameter.requires_grad_(False).copy_(drawn if parameter.ndim > 1 else parameter + drawn)
    return model.requires_grad_(False).train()


def hugging_face(kind: str, implementation: str = "eager") -> Any:
    """A model of the kind: two layers, three heads, width 24, dropout 0.5, in float32."""
    bert = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 32,
        "attention_probs_dropout_prob": 0.5,
        "hidden_dropout_prob": 0.5,
        "pad_token_id": 0,
    }
    gpt2 = {"n_embd": 24, "n_layer": 2, "n_head": 3, "attn_pdrop": 0.5, "resid_pdrop": 0.5}
    distil = {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 32, "attention_dropout": 0.5}
    # Four query heads of width 8, which is not 24 / 4, on two heads of keys and values.
    llama = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 32,
        "attention_dropout": 0.5,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    made = {
        "bert": lambda: (hf.BertModel, hf.BertConfig(**bert)),
        "bert-decoder": lambda: (hf.BertLMHeadModel, hf.BertConfig(**bert, is_decoder=True)),
        "roberta": lambda: (hf.RobertaForMaskedLM, hf.RobertaConfig(**bert)),
        "distilbert": lambda: (hf.DistilBertModel, hf.DistilBertConfig(vocab_size=VOCABULARY, **distil)),
        "gpt2": lambda: (
            hf.GPT2LMHeadModel,
            hf.GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **gpt2),
        ),
        "roformer": lambda: (hf.RoFormerModel, hf.RoFormerConfig(**bert)),
        "llama": lambda: (hf.LlamaForCausalLM, hf.LlamaConfig(**llama, attention_bias=True)),
        "half-rotary": lambda: (
            hf.GlmModel,
            hf.GlmConfig(**llama, pad_token_id=0, partial_rotary_factor=0.5),
        ),
        "mistral": lambda: (hf.MistralModel, hf.MistralConfig(**llama, sliding_window=3)),
        "qwen2": lambda: (hf.Qwen2Model, hf.Qwen2Config(**llama)),
        "qwen3": lambda: (hf.Qwen3Model, hf.Qwen3Config(**llama)),
    }
    model, config = made[kind]()
    return spread(model._from_config(config, attn_implementation=implementation))


class Nested(nn.Module):
    """A user's own model: embedding, a causal encoder somewhere inside, a head."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        layer = nn.TransformerEncoderLayer(24, 3, 32, dropout=0.5, batch_first=batch_first)
        self.inside = nn.ModuleDict(
            {"core": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)}
        )
        self.head = nn.Linear(24, VOCABULARY)
        self.batch_first = batch_first

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.embedding(ids)
        x = x if self.batch_first else x.transpose(0, 1)
        return self.head(self.inside["core"](x, mask=mask, is_causal=True))
