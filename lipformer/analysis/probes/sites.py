"""Which modules of a model are attention that is known, the heads of each, and what a call added."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipformer.analysis.maps import (
    HasAttentionMaps,
    Heads,
    attention_maps,
    split_heads,
    split_qkv_bias,
    torch_heads,
)
from lipformer.functional.attention.maps import AttentionMaps
from lipformer.layers.attention.positions import rotary_angles
from lipformer.layers.convert.foreign import linear_map
from lipformer.models.causal_attention import DotProductAttention, causal_bias

SUPPORTED = (
    "torch.nn.MultiheadAttention (also inside torch.nn.TransformerEncoder), lipformer's dot-product "
    "attention, modules with attention_maps(), and Hugging Face's attention of BERT type (query, key, "
    "value beside output.dense: BERT, RoBERTa, ELECTRA, MiniLM), of DistilBERT type (q_lin, k_lin, "
    "v_lin, out_lin), of GPT-2 type (c_attn, c_proj) and of Llama type (q_proj, k_proj, v_proj, o_proj, "
    "grouped queries, rotary positions: Llama, Mistral, Qwen2, Qwen3)"
)


class Site(NamedTuple):
    """An attention layer in a model.

    Attributes:
        name: its path.
        module: the layer; its first argument are the tokens.
        result: the module whose output is that of attention with its output projection.
    """

    name: str
    module: nn.Module
    result: nn.Module


def find_sites(model: nn.Module) -> list[Site]:
    """Every supported attention layer of a model, in the order of its modules."""
    modules = dict(model.named_modules())
    found = []
    for name, module in modules.items():
        if _kind(module) is None:
            continue
        result: nn.Module | None = module
        if _kind(module) == "bert":
            parent = modules[name.rpartition(".")[0]] if name else module
            result = getattr(getattr(parent, "output", None), "dense", None)
        if result is not None:
            found.append(Site(name or type(module).__name__, module, result))
    return found


def unsupported(model: nn.Module) -> list[str]:
    """Classes of the model that are called attention, for messages."""
    return sorted({type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()})


def _kind(module: nn.Module) -> str | None:
    def has(*names: str) -> bool:
        return all(hasattr(module, name) for name in names)

    if isinstance(module, nn.MultiheadAttention):
        return "torch"
    if isinstance(module, DotProductAttention):
        return "lipformer"
    if isinstance(module, HasAttentionMaps):
        return "maps"
    if has("query", "key", "value", "num_attention_heads"):
        return "bert"
    if has("q_lin", "k_lin", "v_lin", "out_lin", "n_heads"):
        return "distilbert"
    if has("c_attn", "c_proj", "num_heads"):
        return "gpt2"
    if has("q_proj", "k_proj", "v_proj", "o_proj", "num_key_value_groups", "head_dim"):
        return "llama"
    return None


def heads_of(site: Site, n: int, arguments: Mapping[str, Any]) -> Heads | AttentionMaps:
    """The pure attention of a layer, with its output projection, as a function of its weights now.

    Args:
        site: the layer.
        n: tokens of the call.
        arguments: of the call, by name.

    Raises:
        ValueError: for a layer that is no plain self-attention.
    """
    module: Any = site.module
    kind = _kind(module)
    if kind == "torch":
        return torch_heads(module)
    if kind == "lipformer":
        parts = [*module.qkv.weight.mT.chunk(3, -1)], [*module.qkv.bias.chunk(3)], module.num_heads
        made = split_heads(*parts, *linear_map(module.out), float(module.head_dim**-0.5), True)
        if module.positions != "rotary":
            return made
        cos, sin = rotary_angles(n, module.head_dim, 0, made.query.device)
        return dataclasses.replace(made, cos=cos, sin=sin)
    if kind == "llama":
        return _rotary_heads(site, arguments)
    if kind == "maps":
        return attention_maps(module)
    if kind == "gpt2":
        if hasattr(module, "q_attn"):
            raise ValueError(f"{site.name} is cross-attention")
        weight, bias = linear_map(module.c_attn)
        biases = split_qkv_bias(bias)
        out, heads = linear_map(module.c_proj), module.num_heads
        return split_heads([*weight.chunk(3, -1)], biases, heads, *out, _scale(module), True)
    named = ("query", "key", "value") if kind == "bert" else ("q_lin", "k_lin", "v_lin")
    layers = [linear_map(getattr(module, name)) for name in named]
    heads = module.num_attention_heads if kind == "bert" else module.n_heads
    out = linear_map(site.result if kind == "bert" else module.out_lin)
    causal = bool(getattr(module, "is_causal", False))
    weights, biases = [w for w, _ in layers], [b for _, b in layers]
    return split_heads(weights, biases, heads, *out, _scale(module), causal)


def _rotary_heads(site: Site, arguments: Mapping[str, Any]) -> Heads:
    """Grouped-query attention with the rotary positions (cos, sin), (1, N, d) each, of its call."""
    module: Any = site.module
    layers = [linear_map(getattr(module, f"{name}_proj")) for name in "qkv"]
    weights, biases = [w for w, _ in layers], [b for _, b in layers]
    width = module.head_dim
    made = split_heads(
        weights, biases, weights[0].shape[1] // width, *linear_map(module.o_proj), _scale(module),
        bool(module.is_causal), module.num_key_value_groups,
    )  # fmt: skip
    parts: dict[str, Any] = {}
    angles = arguments.get("position_embeddings")
    if angles is not None:
        for name, angle in zip(("cos", "sin"), angles, strict=True):
            if angle.shape[-1] != width or len(angle) != 1:
                raise ValueError(
                    f"{site.name}: rotary positions must turn all {width} features of a head, got "
                    f"{name} of shape {tuple(angle.shape)}"
                )
            parts[name] = angle[0, :, : width // 2]  # the second half is the same again
    for name, norm in (
        ("query_norm", getattr(module, "q_norm", None)),
        ("key_norm", getattr(module, "k_norm", None)),
    ):
        if norm is None:
            continue
        if not hasattr(norm, "variance_epsilon") or norm.weight.shape != (width,):
            raise ValueError(f"{site.name}: {name} must be an RMSNorm of {width} features, got {norm}")
        parts[name], parts["norm_eps"] = norm.weight, norm.variance_epsilon
    return dataclasses.replace(made, **parts)


def _scale(module: Any) -> float:
    """The scale of the logits of a Hugging Face layer; older versions have no attribute `scaling`."""
    given = getattr(module, "scaling", None)
    if given is not None:
        return float(given)
    width = getattr(module, "attention_head_size", None) or getattr(module, "head_dim", None)
    if width is None:
        width = module.dim // module.n_heads
    return float(width**-0.5) if getattr(module, "scale_attn_weights", True) else 1.0


def logit_bias(site: Site, heads: int, n: int, arguments: Mapping[str, Any]) -> Tensor | None:
    """What a call added to the logits of its one sequence, broadcastable to (H, N, N); None for nothing.

    Args:
        site: the layer.
        heads: H.
        n: N.
        arguments: of the call, by name: masks are bool or float, of one sequence or of a batch of one.
    """
    module: Any = site.module
    if _kind(module) == "lipformer" and module.slopes is not None:
        slopes = torch.tensor(module.slopes, dtype=torch.float64)
        like = torch.empty(0, dtype=torch.float64)
        return causal_bias(slopes, n, n, like)[0].to(module.qkv.weight.device)
    torch_layer = _kind(module) == "torch"
    total: Tensor | None = None
    for name in ("attn_mask", "key_padding_mask", "attention_mask", "mask"):
        given = arguments.get(name)
        if not isinstance(given, Tensor) or given.numel() == 0:
            continue
        # torch's layer masks where True, everybody else where False
        part = _additive(given, masked_where=torch_layer)
        if part.ndim == 2 and (name == "key_padding_mask" or (not torch_layer and part.shape[0] == 1)):
            part = part[:, None, :]
        if part.ndim == 4:
            part = part[0]
        if part.ndim == 1:
            part = part[None, :]
        if part.ndim == 2:
            part = part[None]
        if part.shape[0] not in (1, heads) or part.shape[1] not in (1, n) or part.shape[2] < n:
            raise ValueError(
                f"{site.name}: {name} of shape {tuple(given.shape)} fits no sequence of {n}"
            )
        part = part[..., :n]
        total = part if total is None else total + part
    return None if total is None or not bool(total.any()) else total


def _additive(mask: Tensor, *, masked_where: bool) -> Tensor:
    """A mask as float64 to add: bool to 0 and -inf, the lowest number of a dtype to -inf too."""
    if not mask.is_floating_point():
        hidden = mask.bool() if masked_where else ~mask.bool()
        return torch.zeros(mask.shape, dtype=torch.float64, device=mask.device).masked_fill(
            hidden, -math.inf
        )
    lowest = torch.finfo(mask.dtype).min / 2
    return mask.detach().double().masked_fill(mask <= lowest, -math.inf)
