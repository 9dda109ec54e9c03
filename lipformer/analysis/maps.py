"""The maps of single tokens that an attention layer is made of, read from its weights."""

from __future__ import annotations

from typing import Protocol, cast, runtime_checkable

import torch
from torch import nn

from lipformer.analysis.inputs import check_finite
from lipformer.functional.attention.maps import AttentionMaps
from lipformer.layers import L2MultiheadAttention


@runtime_checkable
class HasAttentionMaps(Protocol):
    """A module that says itself which maps it is made of."""

    def attention_maps(self) -> AttentionMaps:
        """Its maps, computed from its weights now."""


Attention = AttentionMaps | HasAttentionMaps | nn.Module
"""What `attention_maps` takes."""


def attention_maps(attn: Attention) -> AttentionMaps:
    """The maps of an attention layer in float64, differentiable in its weights.

    Args:
        attn: maps (returned as they are), `torch.nn.MultiheadAttention` used as self-attention, or
            anything with a method `attention_maps()`: `lipformer.models.DotProductSelfAttention`, and an
            `AttentionProbe`, a layer of a Hugging Face model say. A module's method is called with its
            parameters and buffers in float64.

    Raises:
        TypeError: for other modules.
        ValueError: for a torch layer that is no plain self-attention (kdim, bias_k, add_zero_attn).
    """
    if isinstance(attn, AttentionMaps):
        return attn
    if isinstance(attn, nn.MultiheadAttention):
        return _torch_maps(attn)
    if isinstance(attn, HasAttentionMaps):
        return _own_maps(attn)
    raise TypeError(
        "expected AttentionMaps, torch.nn.MultiheadAttention or something with attention_maps(), got "
        f"{type(attn).__name__}{_pointer(attn)}"
    )


def _pointer(attn: object) -> str:
    """Where to go on with something that is no dot-product attention by itself."""
    if isinstance(attn, L2MultiheadAttention):
        return ", which has a global constant: lf.certify(layer)"
    if isinstance(getattr(attn, "self_attn", None), nn.MultiheadAttention):
        return ": give its attention, layer.self_attn"
    if isinstance(attn, nn.Module) and any(attn.children()):
        return ": of a whole model give one of probe_attention(model, tokens), or use layer_gains"
    return ""


def finite_maps(attn: Attention) -> AttentionMaps:
    """`attention_maps` in float64 for bounds; ValueError for NaN or infinite entries."""
    maps = attention_maps(attn).double()
    for name in ("logits", "values", "offset"):
        part = getattr(maps, name)
        if part is not None:
            check_finite(part, f"the {name} of attention")
    return maps


def check_self_attention(layer: nn.MultiheadAttention) -> None:
    """ValueError for a torch layer whose keys or values are more than its own tokens."""
    if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
        raise ValueError(
            "a torch.nn.MultiheadAttention must have kdim = vdim = embed_dim, no add_bias_kv and no "
            f"add_zero_attn to be self-attention alone, got kdim={layer.kdim}, vdim={layer.vdim}, "
            f"embed_dim={layer.embed_dim}, add_bias_kv={layer.bias_k is not None}, "
            f"add_zero_attn={layer.add_zero_attn}"
        )


class _Reader(nn.Module):
    """Its forward is the method `attention_maps` of a module, so that `functional_call` can call it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self) -> AttentionMaps:
        return cast(HasAttentionMaps, self.module).attention_maps()


def _own_maps(module: HasAttentionMaps) -> AttentionMaps:
    """What a module's method gives with its weights in float64, whatever products it forms."""
    if not isinstance(module, nn.Module):
        return module.attention_maps().double()
    reader = _Reader(module)
    tensors = (*reader.named_parameters(), *reader.named_buffers())
    wide = {name: t.double() for name, t in tensors if t.is_floating_point()}
    return torch.func.functional_call(reader, wide, ()).double()


def _torch_maps(layer: nn.MultiheadAttention) -> AttentionMaps:
    check_self_attention(layer)
    heads, dim = layer.num_heads, layer.embed_dim
    q, k, v = (w.mT.reshape(dim, heads, -1).transpose(0, 1) for w in layer.in_proj_weight.chunk(3))
    query_bias = value_bias = None
    if layer.in_proj_bias is not None:
        b = layer.in_proj_bias.chunk(3)
        query_bias, value_bias = b[0].reshape(heads, -1), b[2].reshape(heads, -1)
    out = layer.out_proj.weight.mT.reshape(heads, -1, dim)
    scale = float((dim // heads) ** -0.5)
    return AttentionMaps.from_projections(
        q, k, v, out,
        scale=scale, query_bias=query_bias, value_bias=value_bias, out_bias=layer.out_proj.bias,
    )  # fmt: skip
