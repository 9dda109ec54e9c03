"""distill_attention: both stages come nearer, padded tokens do not count, nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import lipformer as lf

B, N, D, H, V = 4, 6, 16, 4, 30
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")


def encoder(batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, H, 24, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def bert() -> nn.Module:
    sizes = {"hidden_size": D, "num_attention_heads": H, "intermediate_size": 24, "vocab_size": V}
    return hf.BertModel(hf.BertConfig(num_hidden_layers=2, **sizes))


def gpt2() -> nn.Module:
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return hf.GPT2Model(hf.GPT2Config(vocab_size=V, n_embd=D, n_layer=2, n_head=H, **ends))


def drawn(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.3)
    return model


def batches(kind: str) -> list[Any]:
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[0, 4:] = True
    if kind in ("bert", "gpt2"):
        valid = (~padding).long()
        return [{"input_ids": torch.randint(V, (B, N)), "attention_mask": valid} for _ in range(3)]
    sizes = (B, N, D) if kind == "torch" else (N, B, D)
    return [(torch.randn(sizes), None, padding) for _ in range(3)]


MODELS = {
    "bert": bert,
    "gpt2": gpt2,
    "torch": lambda: encoder(True),
    "torch, sequence first": lambda: encoder(False),
}


@pytest.mark.parametrize("kind", MODELS)
def test_both_stages_come_nearer(kind: str) -> None:
    original = drawn(MODELS[kind]()).train()
    model = lf.convert_attention(copy.deepcopy(original)).model
    before = copy.deepcopy(original.state_dict())
    rest = {name: p.clone() for name, p in model.named_parameters() if "norm" in name.lower()}
    given = batches(kind)
    first = lf.distill_attention(model, original, given, steps=(40, 0), lr=(1e-2, 0.0))
    assert len(first.errors) == 2
    assert all(after < 0.8 * start for start, after in first.errors.values())
    assert first.losses == ()
    now = dict(model.named_parameters())
    assert all(now[name].equal(p) for name, p in rest.items())  # attention alone
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    embedded = [weight.clone() for weight in tables]
    second = lf.distill_attention(model, original, given, steps=(0, 30), lr=(0.0, 1e-2))
    assert sum(second.losses[-3:]) < 0.7 * sum(second.losses[:3])
    assert str(first).startswith("layer")
    assert "end to end, loss over 30 steps" in str(second)
    assert all(weight.equal(first) for weight, first in zip(tables, embedded, strict=True))
    assert all(weight.requires_grad and weight.grad is None for weight in tables)
    # The original is as it was, and no hooks are left.
    assert all(p.equal(before[name]) for name, p in original.state_dict().items())
    assert model.training
    assert original.training
    assert not any(m._forward_hooks for whole in (model, original) for m in whole.modules())
    model.eval()
    lf.certify(next(m for m in model.modules() if isinstance(m, lf.L2MultiheadAttention)), seq_len=N)


def test_padded_tokens_do_not_count() -> None:
    """Whatever stands there, the same steps are taken."""
    original = drawn(encoder(True))
    given, found = batches("torch"), []
    for junk in (0.0, 100.0):
        model = lf.convert_attention(copy.deepcopy(original)).model
        other = [(x.masked_fill(mask.unsqueeze(-1), junk), None, mask) for x, _, mask in given]
        done = lf.distill_attention(model, original, other, steps=(3, 3))
        found.append((*done.errors.values(), done.losses))
    torch.testing.assert_close(found[0], found[1])


def test_what_it_cannot_use_is_refused() -> None:
    original = encoder(True)
    model = lf.convert_attention(copy.deepcopy(original)).model
    x: list[Tensor] = [torch.randn(B, N, D)]
    with pytest.raises(ValueError, match="TransformerEncoder has no L2 attention"):
        lf.distill_attention(original, original, x)
    with pytest.raises(ValueError, match="no attention at layers.0.self_attn"):
        lf.distill_attention(model, model, x)
    with pytest.raises(ValueError, match="two integers"):
        lf.distill_attention(model, original, x, steps=(3, -1))
    with pytest.raises(ValueError, match="batches are empty"):
        lf.distill_attention(model, original, iter(x), steps=(2, 0))
