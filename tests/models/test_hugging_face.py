"""attn_implementation="lipformer_l2": L2 attention by name, against its definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from tests.analysis.models import VOCABULARY, hugging_face

B, N = 2, 7
CAUSAL = {"bert": False, "llama": True, "qwen3": True}
models = pytest.mark.parametrize("kind", CAUSAL)


@pytest.fixture(autouse=True)
def _named() -> None:
    lf.models.register_l2_attention()


def inputs() -> tuple[Tensor, Tensor]:
    """Ids, and a mask with padding: at the end of one sequence, at the start of the other."""
    valid = torch.ones(B, N, dtype=torch.int64)
    valid[0, 5:], valid[1, :2] = 0, 0
    return torch.randint(1, VOCABULARY, (B, N)), valid


def turned(y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions as products of complex numbers."""
    half = y.shape[-1] // 2
    z = torch.complex(y[..., :half], y[..., half:]) * torch.complex(cos, sin)[:, None, :, :half]
    return torch.cat([z.real, z.imag], dim=-1)


def l2_attention(layer: Any, x: Tensor, seen: Tensor, angles: Any) -> Tensor:
    """Softmax of -s |q_i - k_j|^2 over the keys that are seen, query by query and head by head."""
    names = ("query", "key", "value") if hasattr(layer, "query") else ("q_proj", "k_proj", "v_proj")
    width = layer.attention_head_size if hasattr(layer, "query") else layer.head_dim
    q, k, v = (getattr(layer, name)(x).unflatten(-1, (-1, width)).transpose(1, 2) for name in names)
    if hasattr(layer, "q_norm"):
        q, k = layer.q_norm(q), layer.k_norm(k)
    if angles is not None:
        q, k = turned(q, *angles), turned(k, *angles)
    out = torch.zeros_like(q)
    for b, h, i in ((b, h, i) for b in range(B) for h in range(q.shape[1]) for i in range(N)):
        shared = h * k.shape[1] // q.shape[1]
        distances = (q[b, h, i] - k[b, shared]).square().sum(-1)
        weights = (-(width**-0.5) * distances).masked_fill(~seen[b, i], -torch.inf).softmax(-1)
        out[b, h, i] = weights @ v[b, shared]
    mixed = out.transpose(1, 2).flatten(2)
    return layer.o_proj(mixed) if hasattr(layer, "o_proj") else mixed


def attended(model: nn.Module, *args: Any, **kwargs: Any) -> list[tuple[Any, Tensor, Any, Tensor]]:
    """Each attention layer of a call with its input, its rotary positions and its output."""
    found, handles = [], []

    def note(layer: Any, args: Any, kwargs: Any, out: Any) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        found.append((layer, x, kwargs.get("position_embeddings"), out[0]))

    for layer in model.modules():
        if type(layer).__name__ in ("BertSelfAttention", "LlamaAttention", "Qwen3Attention"):
            handles.append(layer.register_forward_hook(note, with_kwargs=True))
    model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return found


@models
def test_it_is_l2_attention_with_the_models_own_masks(kind: str) -> None:
    """Dropout (0.5) is off in eval mode; heads of keys are shared; dot products are another function."""
    model = hugging_face(kind, "lipformer_l2").double().eval()
    ids, valid = inputs()
    for mask in (valid, None):
        shown = torch.ones(B, N, dtype=torch.bool) if mask is None else mask.bool()
        seen = shown[:, None, :].expand(B, N, N)
        if CAUSAL[kind]:
            seen = seen & torch.ones(N, N, dtype=torch.bool).tril()
        calls = attended(model, ids, attention_mask=mask)
        assert len(calls) == 2
        for layer, x, angles, out in calls:
            expected = l2_attention(layer, x, seen, angles)
            # Qwen3 normalises queries and keys in float32.
            rounding = 1e-6 if kind == "qwen3" else 1e-12
            torch.testing.assert_close(out[shown], expected[shown], rtol=0, atol=rounding)
    model.set_attn_implementation("sdpa")
    layer, x, angles, out = attended(model, ids)[0]
    assert (out - l2_attention(layer, x, seen, angles)).abs().max() > 0.1


def test_a_cache_and_float_masks_change_nothing() -> None:
    model = hugging_face("llama", "lipformer_l2").eval()
    ids, valid = inputs()
    ids, valid = ids[1:], valid[1:]  # padded on the left
    options = {"attention_mask": valid, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    assert model.generate(ids, **options).equal(model.generate(ids, use_cache=False, **options))
    bert = hugging_face("bert", "lipformer_l2").eval()
    shown = valid.bool()[:, None, None, :].expand(1, 1, N, N)
    added = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)
    torch.testing.assert_close(bert(ids, attention_mask=added)[0], bert(ids, attention_mask=valid)[0])


@models
def test_it_trains_with_dropout_and_in_half_precision(kind: str) -> None:
    model = hugging_face(kind, "lipformer_l2").requires_grad_(True)
    ids, valid = inputs()
    call = {"attention_mask": valid}
    assert not model(ids, **call)[0].equal(model(ids, **call)[0])  # attention's own dropout, in Llama
    model(ids, **call)[0].square().mean().backward()
    weights = [p for name, p in model.named_parameters() if "k_proj" in name or ".key" in name]
    assert weights
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in weights)
    model.eval()
    exact, half = (m(ids, **call)[0].detach().float() for m in (model, model.bfloat16()))
    shown = valid.bool()
    assert (half - exact)[shown].norm() < 0.1 * exact[shown].norm()


def test_it_has_no_certificate_and_says_what_it_does_not_know() -> None:
    model = hugging_face("bert", "lipformer_l2").eval()
    with pytest.raises(lf.NotCertifiable, match=r"encoder.layer.0.attention.self' \(BertSelfAttention"):
        lf.certify(model, example=torch.arange(1, 5)[None])
    with pytest.raises(
        ValueError, match='attn_implementation="lipformer_l2" takes no output_attentions'
    ):
        model(torch.arange(1, 5)[None], output_attentions=True)
