"""Multi-head dot-product attention as maps of single tokens: the form that all bounds are written in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from lipformer.analysis._inputs import check_finite, check_mask
from lipformer.layers import L2MultiheadAttention


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    r"""Attention of tokens (rows) x with logits and values that are maps of single tokens.

    .. math:: S^h_{ij} = (x_i A_h + b_h) \cdot x_j, \qquad
              f(x)_i = c + \sum_h \sum_j \mathrm{softmax}_j(S^h_{ij})\, x_j W_h

    Every multi-head dot-product attention has this form: :math:`A_h = s\,Q_h K_h^\top` with the scale s
    (:math:`1/\sqrt d`), :math:`W_h = V_h O_h`. Of the biases only that of the query matters for the
    weights, :math:`b_h = s\,K_h q_h`: the key's adds a constant to each row of logits. Rows of weights
    sum to one, so that value and output biases are one constant c.

    Attributes:
        logits: A, (H, D, D).
        values: W, (H, D, E).
        offset: b, (H, D); zero by default.
        constant: c, (E,); zero by default.
        causal: token i sees tokens j <= i alone.
    """

    logits: Tensor
    values: Tensor
    offset: Tensor | None = None
    constant: Tensor | None = None
    causal: bool = False

    def __post_init__(self) -> None:
        for name in ("logits", "values", "offset", "constant"):
            part = getattr(self, name)
            if part is None and name in ("offset", "constant"):
                continue
            if not isinstance(part, Tensor) or not part.is_floating_point():
                got = part.dtype if isinstance(part, Tensor) else type(part).__name__
                raise ValueError(f"{name} must be a floating-point tensor, got {got}")
        a, w = self.logits, self.values
        if a.ndim != 3 or a.shape[-1] != a.shape[-2] or a.numel() == 0:
            raise ValueError(f"logits must be (H, D, D), got {tuple(a.shape)}")
        if w.ndim != 3 or w.shape[:2] != a.shape[:2] or w.numel() == 0:
            raise ValueError(
                f"values must be (H, D, E) = ({a.shape[0]}, {a.shape[1]}, E), got {tuple(w.shape)}"
            )
        for name, given, allowed in (
            ("offset", self.offset, a.shape[:2]),
            ("constant", self.constant, w.shape[2:]),
        ):
            if given is not None and given.shape != allowed:
                raise ValueError(f"{name} must be {tuple(allowed)}, got {tuple(given.shape)}")

    @classmethod
    def from_projections(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        *,
        scale: float,
        query_bias: Tensor | None = None,
        value_bias: Tensor | None = None,
        out_bias: Tensor | None = None,
        causal: bool = False,
    ) -> AttentionMaps:
        """From the projections of each head, differentiably; always in float64.

        Products in the dtype of the weights would be those of another layer, and a bound of it may lie
        below the gain of this one. In float64 they are exact to :math:`d\\,2^{-53}` of the sum of the
        absolute values of their terms.

        Args:
            query: (H, D, d), applied as x @ query.
            key: (H, D, d); its bias has no effect.
            value: (H, D, e).
            out: (H, e, E): the rows of the output projection that belong to the head.
            scale: of the logits, usually d^-1/2.
            query_bias: (H, d).
            value_bias: (H, e).
            out_bias: (E,).
            causal: token i sees tokens j <= i alone.
        """
        query, key, value, out = (part.double() for part in (query, key, value, out))
        offset = None if query_bias is None else scale * (key @ query_bias.double()[..., None])[..., 0]
        constant = None if out_bias is None else out_bias.double()
        if value_bias is not None:
            shift = torch.einsum("he,hef->f", value_bias.double(), out)
            constant = shift if constant is None else shift + constant
        return cls(scale * query @ key.mT, value @ out, offset, constant, causal)

    def double(self) -> AttentionMaps:
        """The same maps in float64, in which bounds are computed."""
        return self.to(torch.float64)

    def to(self, dtype: torch.dtype) -> AttentionMaps:
        """The same maps in another dtype."""

        def moved(part: Tensor | None) -> Tensor | None:
            return None if part is None else part.to(dtype)

        return AttentionMaps(
            self.logits.to(dtype),
            self.values.to(dtype),
            moved(self.offset),
            moved(self.constant),
            self.causal,
        )

    def weights(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The softmax weights P, (*, H, N, N), of tokens x (*, N, D), computed in x's dtype.

        Args:
            x: tokens.
            mask: bool, True where token i may see token j, broadcastable to (*, 1, N, N); combined
                with `causal`. Every token must see at least one, else ValueError.
        """
        rows = torch.einsum("...nd,hde->...hne", x, self.logits.to(x.dtype))
        if self.offset is not None:
            rows = rows + self.offset.to(x.dtype)[:, None]
        scores = rows @ x[..., None, :, :].mT
        allowed = self.allowed(x, mask)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        return scores.softmax(-1)

    def allowed(self, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """`causal` and mask as one bool mask broadcastable to (*, H, N, N); None if all see all."""
        n = x.shape[-2]
        if mask is not None:
            check_mask(mask, n)
        if not self.causal:
            return mask
        lower = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
        if mask is None:
            return lower
        both = lower & mask
        check_mask(both, n)
        return both

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """f(x), (*, N, D) -> (*, N, E), computed in x's dtype."""
        mixed = self.weights(x, mask) @ x[..., None, :, :]
        out = torch.einsum("...hnd,hde->...ne", mixed, self.values.to(x.dtype))
        return out if self.constant is None else out + self.constant.to(x.dtype)


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
