"""Which classes of other libraries are self-attention, where each keeps its weights, how it is called.

Classes are known by package and name, so that nothing is imported, and nothing that only looks alike is
taken: a class with other weights or another forward has another name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipformer.layers.convert.hosts import (
    HostedAttention,
    HuggingFaceAttention,
    TimmAttention,
    XTransformersAttention,
)


class Parts(NamedTuple):
    """What a self-attention layer is made of.

    Attributes:
        qkv: its maps to queries, keys and values, or the one map to all three.
        out: its map to the output.
        heads: H.
        scale: of the logits.
        causal: whether later keys are hidden; None if each call says so.
        dropout: of attention weights.
        host: the class that answers its calls, None if L2MultiheadAttention does.
        after: the dropout of its output.
        outside: the module that holds ``out``, if it is not the layer, and under which name.
    """

    qkv: Sequence[Any]
    out: nn.Module
    heads: int
    scale: float
    causal: bool | None
    dropout: float
    host: type[HostedAttention] | None
    after: nn.Module | None = None
    outside: tuple[nn.Module, str] | None = None


def _torch(layer: Any, above: Sequence[nn.Module]) -> Parts:
    if type(layer).forward is not nn.MultiheadAttention.forward:
        raise ValueError("it overrides forward")
    if not layer._qkv_same_embed_dim:
        raise ValueError("cross-attention")
    if layer.bias_k is not None or layer.add_zero_attn:
        raise ValueError("it adds extra keys")
    joint = SimpleNamespace(weight=layer.in_proj_weight, bias=layer.in_proj_bias)
    scale = layer.head_dim**-0.5
    return Parts([joint], layer.out_proj, layer.num_heads, scale, None, layer.dropout, None)


def _bert(layer: Any, above: Sequence[nn.Module]) -> Parts:
    output: Any = getattr(above[0], "output", None) if above else None
    if not hasattr(output, "dense"):
        raise ValueError("its output projection is in the module that holds it: convert that one")
    qkv = [layer.query, layer.key, layer.value]
    return Parts(
        qkv,
        output.dense,
        layer.num_attention_heads,
        layer.scaling,
        layer.is_causal,
        layer.dropout.p,
        HuggingFaceAttention,
        outside=(output, "dense"),
    )


def _distilbert(layer: Any, above: Sequence[nn.Module]) -> Parts:
    qkv = [layer.q_lin, layer.k_lin, layer.v_lin]
    p, host = layer.dropout.p, HuggingFaceAttention
    return Parts(qkv, layer.out_lin, layer.n_heads, layer.scaling, False, p, host)


def _vit(layer: Any, above: Sequence[nn.Module]) -> Parts:
    qkv = [layer.q_proj, layer.k_proj, layer.v_proj]
    heads, p, host = layer.num_attention_heads, layer.attention_dropout, HuggingFaceAttention
    return Parts(qkv, layer.o_proj, heads, layer.scaling, False, p, host)


def _gpt2(layer: Any, above: Sequence[nn.Module]) -> Parts:
    if layer.is_cross_attention:
        raise ValueError("cross-attention")
    p, after, host = layer.attn_dropout.p, layer.resid_dropout, HuggingFaceAttention
    return Parts([layer.c_attn], layer.c_proj, layer.num_heads, layer.scaling, True, p, host, after)


def _timm(layer: Any, above: Sequence[nn.Module]) -> Parts:
    sizes = {"num_heads": layer.num_heads, "attn_head_dim": layer.head_dim}
    _refuse_options(layer, layer.qkv.in_features, **sizes)
    p, after = layer.attn_drop.p, layer.proj_drop
    return Parts([layer.qkv], layer.proj, layer.num_heads, layer.scale, None, p, TimmAttention, after)


# What an x-transformers model may add to the logits or values of its layers.
_CHANGES = ("rotary_pos_emb", "polar_pos_emb", "rel_pos", "residual_attn", "add_value_residual")


def _x_transformers(layer: Any, above: Sequence[nn.Module]) -> Parts:
    for place, holder in enumerate(above):
        kinds: Any = getattr(holder, "layer_types", None)
        if kinds is not None:
            blocks: Any = above[place - 1]
            if kinds[list(blocks).index(above[place - 2])] == "c":
                raise ValueError("cross-attention")
            for name in _CHANGES:
                if getattr(holder, name, None) not in (None, False):
                    raise ValueError(f"its model has {name}, which changes its logits or values")
            break
    sizes = {"heads": layer.heads, "dim_head": layer.to_q.out_features // layer.heads}
    options = {"causal": layer.causal, "flash": layer.attend.flash, "dropout": layer.attend.dropout}
    _refuse_options(layer, layer.to_q.in_features, **sizes, **options)
    qkv, p = [layer.to_q, layer.to_k, layer.to_v], layer.attend.dropout
    host, after = XTransformersAttention, layer.sublayer_dropout
    return Parts(qkv, layer.to_out, layer.heads, layer.scale, layer.causal, p, host, after)


def _named(package: str, *names: str) -> Iterator[str]:
    return (f"{package}.{name}" for name in names)


_BERT = (
    "BertGeneration", "Bert", "Camembert", "Data2VecText", "Electra", "Ernie", "RoCBert", "Roberta",
    "RobertaPreLayerNorm", "XLMRoberta", "XLMRobertaXL", "Xmod",
)  # fmt: skip
_VIT = ("DeiT", "Dinov2", "Dinov2WithRegisters", "IJepa", "ViT", "ViTMAE", "ViTMSN")
_Read = Callable[[Any, Sequence[nn.Module]], Parts]
FOREIGN: dict[str, _Read] = {
    "torch.MultiheadAttention": _torch,
    **dict.fromkeys(_named("transformers", *(f"{name}SelfAttention" for name in _BERT)), _bert),
    "transformers.DistilBertSelfAttention": _distilbert,
    **dict.fromkeys(_named("transformers", *(f"{name}Attention" for name in _VIT)), _vit),
    "transformers.GPT2Attention": _gpt2,
    "timm.Attention": _timm,
    "x_transformers.Attention": _x_transformers,
}
"""By package and class: how the parts of a layer are found, given the modules above it, nearest first.

Raises ValueError with the reason for a layer that is no plain self-attention.
"""


def known(module: nn.Module) -> _Read | None:
    """The entry of a module in :data:`FOREIGN`."""
    if isinstance(module, nn.MultiheadAttention):
        return _torch
    cls = type(module)
    return FOREIGN.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}")


def _refuse_options(layer: nn.Module, *args: Any, **options: Any) -> None:
    """Raises for a layer that differs from a plain one of its class, built with these arguments."""
    with torch.device("meta"):
        plain = type(layer)(*args, **options)
    for name, own, other in _differing(layer, plain):
        # The choice of a kernel, and the dropouts that are kept.
        if name not in ("fused_attn", "sublayer_dropout") and not name.endswith(".p"):
            raise ValueError(f"its {name} is {own}, in plain attention {other}")


def _differing(layer: nn.Module, plain: nn.Module) -> Iterator[tuple[str, object, object]]:
    """The settings, and parts by their class, in which two modules of a class differ."""
    for name, own in vars(layer).items():
        other = vars(plain).get(name)
        if isinstance(own, partial) and isinstance(other, partial):
            own, other = (own.func, own.args, own.keywords), (other.func, other.args, other.keywords)
        elif callable(own) and type(own) is type(other):
            continue
        if name != "training" and not name.startswith("_") and own != other:
            yield name, own, other
    for name in {**layer._parameters, **plain._parameters}:
        own, other = layer._parameters.get(name), plain._parameters.get(name)
        if name != "bias" and (own is None) != (other is None):
            yield name, "a parameter", "none"
    for name in {**layer._modules, **plain._modules}:
        part, same = layer._modules.get(name), plain._modules.get(name)
        if type(part) is not type(same):
            yield name, type(part).__name__, type(same).__name__
        elif part is not None and same is not None:
            for inner, own, other in _differing(part, same):
                yield f"{name}.{inner}", own, other


def linear_map(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Weight (in, out) and bias of a linear layer; transformers' Conv1D keeps (in, out) itself.

    Raises:
        ValueError: it is none, or multiplies by other numbers than those of its weight.
    """
    kind = type(layer).__name__
    plain = not isinstance(layer, nn.Module) or type(layer).forward is nn.Linear.forward
    if not plain and kind != "Conv1D":
        raise ValueError(f"a projection must be an nn.Linear or Conv1D, got {kind}")
    weight: Any = layer.weight
    if not weight.is_floating_point():
        raise ValueError(f"a projection must have a floating-point weight, got {kind}")
    return (weight if kind == "Conv1D" else weight.mT), getattr(layer, "bias", None)
