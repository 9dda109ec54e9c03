"""Dot-product attention read from a layer's weights: as projections, or as maps of single tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipformer.analysis.inputs import check_finite, refuse_autocast
from lipformer.certificate import Ask
from lipformer.certificate.bounds import bound_rules
from lipformer.certificate.rules import check_forward, kind_of, methods_behind
from lipformer.functional.attention.maps import AttentionMaps, TensorParts
from lipformer.layers import L2MultiheadAttention
from lipformer.layers.attention.positions import rotate


@dataclass(frozen=True, eq=False)
class Heads(TensorParts):
    r"""Pure attention of tokens (rows) x: no residual, no normalisation, no dropout.

    .. math:: S^h_{ij} = s\,R_i\,n(x_i Q_h + q_h) \cdot R_j\,n(x_j K_h + k_h) + B^h_{ij}, \qquad
              f(x)_i = c + \sum_h \sum_j \mathrm{softmax}_j(S^h_{ij})\, (x_j V_h + v_h) O_h

    with rotary positions R and a normalisation n of queries and keys where a model has them.

    Without these it is the function of `AttentionMaps` in factors of rank d, the width of a head: a
    product with its Jacobian costs :math:`O(N D^2 + N^2 D)`, not :math:`O(H N D^2 + H N^2 D)`. Without
    `out` the heads are concatenated.

    Attributes:
        query: Q, (H, D, d).
        key: K, (H, D, d).
        value: V, (H, D, e).
        out: O, (H, e, E), or None.
        scale: s.
        query_bias: q, (H, d).
        key_bias: k, (H, d); it matters only with R or n.
        value_bias: v, (H, e).
        out_bias: c, (E,); not without `out`.
        causal: token i sees tokens j <= i alone.
        cos: of the angles of R, (N, d / 2), or None.
        sin: likewise.
        query_norm: g (d,) of :math:`n(u) = g\,u / \sqrt{|u|^2/d + \epsilon}` (RMSNorm), or None.
        key_norm: likewise for keys.
        norm_eps: :math:`\epsilon`.
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
    cos: Tensor | None = None
    sin: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    norm_eps: float = 0.0

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """f(x), (*, N, D) -> (*, N, E).

        Args:
            x: tokens.
            bias: B, added to the logits, broadcastable to (*, H, N, N); -inf where i may not see j.
        """
        q, k = self._queries_and_keys(x)
        if self.cos is not None and self.sin is not None:
            q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
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

    def _queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """n(x Q + q) and n(x K + k), (*, H, N, d)."""
        q, k = _projected(x, self.query, self.query_bias), _projected(x, self.key, self.key_bias)
        if self.query_norm is not None:
            q = F.rms_norm(q, q.shape[-1:], self.query_norm, self.norm_eps)
        if self.key_norm is not None:
            k = F.rms_norm(k, k.shape[-1:], self.key_norm, self.norm_eps)
        return q, k

    def largest_logit(self, x: Tensor) -> float:
        """s max |query| max |key|: the scale of the rounding errors of the logits."""
        q, k = self._queries_and_keys(x)
        return abs(self.scale) * float(q.norm(dim=-1).amax() * k.norm(dim=-1).amax())

    @property
    def constant(self) -> Tensor | None:
        """What every token gets whatever the tokens are, (E,): the biases of values and output."""
        bias = self.value_bias
        if bias is None:
            return self.out_bias
        shift = bias.flatten() if self.out is None else torch.einsum("he,hef->f", bias, self.out)
        return shift if self.out_bias is None else shift + self.out_bias

    @property
    def bilinear(self) -> bool:
        """Whether logits are bilinear in two tokens, whatever their places: no R and no n."""
        return self.cos is None and self.query_norm is None and self.key_norm is None

    def attention_maps(self) -> AttentionMaps:
        """As maps of single tokens in float64, the form that bounds take.

        Raises:
            ValueError: unless `bilinear`.
        """
        if not self.bilinear:
            raise ValueError(
                "rotary positions and normalised queries or keys have no AttentionMaps: their logits "
                "are not bilinear in two tokens alone"
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


def torch_heads(layer: nn.MultiheadAttention) -> Heads:
    """The heads of torch's layer; ValueError where keys or values are more than its own tokens."""
    if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
        raise ValueError(
            "a torch.nn.MultiheadAttention must have kdim = vdim = embed_dim, no add_bias_kv and no "
            f"add_zero_attn to be self-attention alone, got kdim={layer.kdim}, vdim={layer.vdim}, "
            f"embed_dim={layer.embed_dim}, add_bias_kv={layer.bias_k is not None}, "
            f"add_zero_attn={layer.add_zero_attn}"
        )
    scale = float((layer.embed_dim // layer.num_heads) ** -0.5)
    weights, biases = [*layer.in_proj_weight.mT.chunk(3, -1)], split_qkv_bias(layer.in_proj_bias)
    out = layer.out_proj
    return split_heads(weights, biases, layer.num_heads, out.weight.mT, out.bias, scale, False)


def split_heads(
    weights: list[Tensor],
    biases: list[Tensor | None],
    heads: int,
    out: Tensor,
    out_bias: Tensor | None,
    scale: float,
    causal: bool,
    groups: int = 1,
) -> Heads:
    """From the weights (D, H d) of all heads side by side, query, key and value in this order.

    With groups each key and value head serves so many query heads, one after the other.
    """
    shared = (1, groups, groups)
    q, k, v = (
        w.reshape(w.shape[0], heads // g, -1).transpose(0, 1).repeat_interleave(g, 0)
        for w, g in zip(weights, shared, strict=True)
    )
    qb, kb, vb = (
        None if b is None else b.reshape(heads // g, -1).repeat_interleave(g, 0)
        for b, g in zip(biases, shared, strict=True)
    )
    return Heads(q, k, v, out.reshape(heads, -1, out.shape[-1]), scale, qb, kb, vb, out_bias, causal)


def split_qkv_bias(bias: Tensor | None) -> list[Tensor | None]:
    """The biases of query, key and value that lie in one vector."""
    return [None, None, None] if bias is None else [*bias.chunk(3)]


@runtime_checkable
class HasAttentionMaps(Protocol):
    """A module that says itself which maps it is made of."""

    def attention_maps(self) -> AttentionMaps:
        """Its maps, computed from its weights now."""


Attention = AttentionMaps | HasAttentionMaps | nn.Module
"""What `attention_maps` takes."""


def attention_maps(attn: Attention) -> AttentionMaps:
    """Returns the maps of an attention layer in float64, differentiable in its weights.

    Args:
        attn: maps (returned as they are), `torch.nn.MultiheadAttention` used as self-attention, or
            anything with a method `attention_maps()`: `lipformer.models.DotProductSelfAttention`, and an
            `AttentionProbe`, a layer of a Hugging Face model say. A module's method is called with its
            parameters and buffers in float64, bounded and other parametrized weights as it has them.

    Raises:
        TypeError: for other modules.
        NotCertifiable: the module has hooks, or a forward of its own that its maps do not know.
        ValueError: for a torch layer that is no plain self-attention (kdim, bias_k, add_zero_attn).
    """
    if isinstance(attn, AttentionMaps):
        return attn
    if isinstance(attn, nn.Module):
        refuse = Ask("l2", kind=kind_of(attn)).refuse
        own = next((c for c in type(attn).__mro__ if "attention_maps" in vars(c)), nn.MultiheadAttention)
        for name, part in attn.named_children():
            bound_rules.find(part, Ask("l2", path=name, kind=kind_of(part)).refuse)
        if isinstance(attn, own):
            # The maps are those of the forward that stands beside them.
            relied = methods_behind(own, ("forward", "attention_maps"))
            check_forward(attn, own, relied, refuse, "attention maps")
    if isinstance(attn, nn.MultiheadAttention):
        return torch_heads(attn).attention_maps()
    if isinstance(attn, HasAttentionMaps):
        return _own_maps(attn)
    raise TypeError(
        "expected AttentionMaps, torch.nn.MultiheadAttention or something with attention_maps(), got "
        f"{type(attn).__name__}{_pointer(attn)}"
    )


def _pointer(attn: object) -> str:
    """Hint for something that is not dot-product attention itself."""
    if isinstance(attn, L2MultiheadAttention):
        return ", which has a global constant: lf.certify(layer)"
    if isinstance(getattr(attn, "self_attn", None), nn.MultiheadAttention):
        return ": give its attention, layer.self_attn"
    if isinstance(attn, nn.Module) and any(attn.children()):
        return ": of a whole model give one of probe_attention(model, tokens), or use layer_gains"
    return ""


def finite_maps(attn: Attention) -> AttentionMaps:
    """`attention_maps` in float64 for bounds; ValueError for NaN or infinite entries."""
    if isinstance(attn, nn.Module):
        refuse_autocast(attn)
    maps = attention_maps(attn).to(torch.float64)
    for name in ("logits", "values", "offset"):
        part = getattr(maps, name)
        if part is not None:
            check_finite(part, f"the {name} of attention")
    return maps


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
        return module.attention_maps().to(torch.float64)
    reader = _Reader(module)
    tensors = (*reader.named_parameters(), *reader.named_buffers())
    # A bounded weight is what the module multiplies by, not what float64 would make of the raw one.
    wide = {
        name: t.double()
        for name, t in tensors
        if t.is_floating_point() and ".parametrizations." not in name
    }
    return torch.func.functional_call(reader, wide, ()).to(torch.float64)
