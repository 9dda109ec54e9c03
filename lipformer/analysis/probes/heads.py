"""Multi-head dot-product attention kept as projections: as quick to apply as the layer it describes.

The heads of other people's attention layers, read from their weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipformer.analysis.maps import HasAttentionMaps, attention_maps, check_self_attention
from lipformer.functional.attention.maps import AttentionMaps
from lipformer.layers.attention.positions import rotary_angles, rotate
from lipformer.models.causal_attention import DotProductAttention, causal_bias


@dataclass(frozen=True, eq=False)
class Heads:
    r"""Pure attention of tokens (rows) x: no residual, no normalisation, no dropout.

    .. math:: S^h_{ij} = s\,(x_i Q_h + q_h) \cdot (x_j K_h + k_h) + B^h_{ij}, \qquad
              f(x)_i = c + \sum_h \sum_j \mathrm{softmax}_j(S^h_{ij})\, (x_j V_h + v_h) O_h

    It is the function of `AttentionMaps` in factors of rank d, the width of a head: a product with its
    Jacobian costs :math:`O(N D^2 + N^2 D)`, not :math:`O(H N D^2 + H N^2 D)`. Without `out` the heads
    are concatenated.

    Attributes:
        query: Q, (H, D, d).
        key: K, (H, D, d).
        value: V, (H, D, e).
        out: O, (H, e, E), or None.
        scale: s.
        query_bias: q, (H, d).
        key_bias: k, (H, d); it matters only with `rotary`.
        value_bias: v, (H, e).
        out_bias: c, (E,); not without `out`.
        causal: token i sees tokens j <= i alone.
        rotary: queries and keys are turned by rotary positions.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor | None
    scale: float
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    out_bias: Tensor | None = None
    causal: bool = False
    rotary: bool = False

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """f(x), (*, N, D) -> (*, N, E).

        Args:
            x: tokens.
            bias: B, added to the logits, broadcastable to (*, H, N, N); -inf where i may not see j.
        """
        q, k = _projected(x, self.query, self.query_bias), _projected(x, self.key, self.key_bias)
        if self.rotary:
            angles = rotary_angles(x.shape[-2], q.shape[-1], 0, x.device)
            q, k = rotate(q, *angles), rotate(k, *angles)
        scores = (self.scale * q) @ k.mT
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        if self.causal:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(ahead, -torch.inf)
        mixed = scores.softmax(-1) @ _projected(x, self.value, self.value_bias)
        if self.out is None:
            return mixed.transpose(-2, -3).flatten(-2)
        result = torch.einsum("...hne,hef->...nf", mixed, self.out)
        return result if self.out_bias is None else result + self.out_bias

    def without_projection(self) -> Heads:
        """The same heads, concatenated instead of projected."""
        return dataclasses.replace(self, out=None, out_bias=None)

    def to(self, dtype: torch.dtype) -> Heads:
        """The same heads in another dtype, detached from the layer's weights."""
        cast: dict[str, Any] = {
            name: part.detach().to(dtype)
            for name, part in vars(self).items()
            if isinstance(part, Tensor)
        }
        return dataclasses.replace(self, **cast)

    def largest_logit(self, x: Tensor) -> float:
        """s max |query| max |key|: the scale of the rounding errors of the logits."""
        q, k = _projected(x, self.query, self.query_bias), _projected(x, self.key, self.key_bias)
        return abs(self.scale) * float(q.norm(dim=-1).amax() * k.norm(dim=-1).amax())

    def constant(self) -> Tensor | None:
        """What every token gets whatever the tokens are, (E,): the biases of values and output."""
        bias = self.value_bias
        if bias is None:
            return self.out_bias
        shift = bias.flatten() if self.out is None else torch.einsum("he,hef->f", bias, self.out)
        return shift if self.out_bias is None else shift + self.out_bias

    def maps(self) -> AttentionMaps:
        """As maps of single tokens in float64, the form that bounds take.

        Raises:
            ValueError: with `rotary`, whose logits are no function of two tokens alone.
        """
        if self.rotary:
            raise ValueError(
                "attention with rotary positions has no AttentionMaps: its logits depend on i - j"
            )
        out = self.out
        if out is None:
            heads, width = self.value.shape[0], self.value.shape[2]
            out = torch.eye(heads * width, dtype=self.value.dtype, device=self.value.device)
            out = out.reshape(heads, width, heads * width)
        return AttentionMaps.from_projections(
            self.query, self.key, self.value, out,
            scale=self.scale, query_bias=self.query_bias, value_bias=self.value_bias,
            out_bias=self.out_bias, causal=self.causal,
        )  # fmt: skip


def _projected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W_h + b_h for each head, (*, N, D) -> (*, H, N, d)."""
    made = torch.einsum("...nd,hde->...hne", x, weight)
    return made if bias is None else made + bias[:, None]


SUPPORTED = (
    "torch.nn.MultiheadAttention (also inside torch.nn.TransformerEncoder), lipformer's dot-product "
    "attention, modules with attention_maps(), and Hugging Face's attention of BERT type (query, key, "
    "value beside output.dense: BERT, RoBERTa, ELECTRA, MiniLM), of DistilBERT type (q_lin, k_lin, "
    "v_lin, out_lin) and of GPT-2 type (c_attn, c_proj)"
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
    return None


def heads_of(site: Site) -> Heads | AttentionMaps:
    """The pure attention of a layer, with its output projection, as a function of its weights now.

    Raises:
        ValueError: for a layer that is no plain self-attention.
    """
    module: Any = site.module
    kind = _kind(module)
    if kind == "torch":
        return _torch(module)
    if kind == "lipformer":
        parts = [*module.qkv.weight.mT.chunk(3, -1)], [*module.qkv.bias.chunk(3)], module.num_heads
        scale = float(module.head_dim**-0.5)
        return _heads(*parts, *_linear(module.out), scale, True, module.positions == "rotary")
    if kind == "maps":
        return attention_maps(module)
    if kind == "gpt2":
        if hasattr(module, "q_attn"):
            raise ValueError(f"{site.name} is cross-attention")
        weight, bias = _linear(module.c_attn)
        biases = _thirds(bias)
        out, heads = _linear(module.c_proj), module.num_heads
        return _heads([*weight.chunk(3, -1)], biases, heads, *out, _scale(module), True)
    named = ("query", "key", "value") if kind == "bert" else ("q_lin", "k_lin", "v_lin")
    layers = [_linear(getattr(module, name)) for name in named]
    heads = module.num_attention_heads if kind == "bert" else module.n_heads
    out = _linear(site.result if kind == "bert" else module.out_lin)
    causal = bool(getattr(module, "is_causal", False))
    weights, biases = [w for w, _ in layers], [b for _, b in layers]
    return _heads(weights, biases, heads, *out, _scale(module), causal)


def _torch(layer: nn.MultiheadAttention) -> Heads:
    check_self_attention(layer)
    bias: Tensor | None = layer.in_proj_bias
    biases = _thirds(bias)
    scale = float((layer.embed_dim // layer.num_heads) ** -0.5)
    weights = [*layer.in_proj_weight.mT.chunk(3, -1)]
    return _heads(weights, biases, layer.num_heads, *_linear(layer.out_proj), scale, False)


def _heads(
    weights: list[Tensor],
    biases: list[Tensor | None],
    heads: int,
    out: Tensor,
    out_bias: Tensor | None,
    scale: float,
    causal: bool,
    rotary: bool = False,
) -> Heads:
    """From the weights (D, H d) of all heads side by side, query, key and value in this order."""
    q, k, v = (w.reshape(w.shape[0], heads, -1).transpose(0, 1) for w in weights)
    qb, kb, vb = (None if b is None else b.reshape(heads, -1) for b in biases)
    return Heads(
        q, k, v, out.reshape(heads, -1, out.shape[-1]), scale, qb, kb, vb, out_bias, causal, rotary
    )


def _thirds(bias: Tensor | None) -> list[Tensor | None]:
    """The biases of query, key and value that lie in one vector."""
    return [None, None, None] if bias is None else [*bias.chunk(3)]


def _linear(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight (in, out) and bias of a linear layer; transformers' Conv1D keeps (in, out) itself."""
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.ndim != 2:
        raise ValueError(
            f"a projection of attention must have a weight matrix, got {type(layer).__name__}"
        )
    return (weight if type(layer).__name__ == "Conv1D" else weight.mT), bias


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
