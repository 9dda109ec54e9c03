"""The layers that the benchmark compares: torch's, ours, and what people use for L2 attention today.

Every module here maps tokens (B, N, D) to one tensor, is causal, and has no dropout.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import lipformer as lf


@dataclass(frozen=True)
class Shape:
    """Width D, number of heads H and number of tokens N of a layer."""

    dim: int
    heads: int
    length: int


class TorchAttention(nn.Module):
    """nn.MultiheadAttention, called so that it takes its fused causal path."""

    mask: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(shape.dim, shape.heads, batch_first=True)
        # Its API wants the mask beside is_causal, though without weights it then drops the mask.
        mask = nn.Transformer.generate_square_subsequent_mask(shape.length)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False, attn_mask=self.mask, is_causal=True)[0]


class DotProductAttention(nn.Module):
    """The shortest dot-product layer: one projection in, the fused kernel, one projection out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.in_proj = nn.Linear(shape.dim, 3 * shape.dim)
        self.out_proj = nn.Linear(shape.dim, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.in_proj(x), "b n (s h d) -> s b h n d", s=3, h=self.heads)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(rearrange(heads, "b h n d -> b n (h d)"))


class CdistAttention(nn.Module):
    r"""L2 attention as it is usually written: torch.cdist and N x N matrices.

    The same function as the lean L2MultiheadAttention, with the same parameters, so that the two
    differ in nothing but the way it is computed:
    :math:`\mathrm{softmax}_j(-t_h \|y_i - y_j\|^2) y_j`, heads joined and projected.
    """

    hidden: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q_proj = nn.Linear(shape.dim, shape.dim, bias=False)
        self.out_proj = nn.Linear(shape.dim, shape.dim)
        self.log_temperature = nn.Parameter(torch.zeros(shape.heads))
        hidden = torch.ones(shape.length, shape.length, dtype=torch.bool).triu(1)
        self.register_buffer("hidden", hidden, persistent=False)
        self.load_state_dict(lean(shape).state_dict())

    def forward(self, x: Tensor) -> Tensor:
        y = rearrange(self.q_proj(x), "b n (h d) -> b h n d", h=self.heads)
        logits = -self.log_temperature.exp()[:, None, None] * torch.cdist(y, y).square()
        weights = logits.masked_fill(self.hidden, -torch.inf).softmax(-1)
        return self.out_proj(rearrange(weights @ y, "b h n d -> b n (h d)"))


class OutputOnly(nn.Module):
    """L2MultiheadAttention without weights, and its output alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, need_weights=False)[0]


class BoundsAlone(nn.Module):
    """The spectral bounds of a lean layer's two weights and nothing else."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        layer = lean(shape)
        self.weights = nn.ParameterList([layer.q_proj.weight, layer.out_proj.weight])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([lf.functional.spectral_norm_bound(w) for w in self.weights])


def lean(shape: Shape, **options: Any) -> lf.L2MultiheadAttention:
    """Our causal layer, in the lean form unless told otherwise."""
    options = {"causal": True, "batch_first": True, **options}
    return lf.L2MultiheadAttention(shape.dim, shape.heads, **options)


def _ours(shape: Shape, **options: Any) -> nn.Module:
    return OutputOnly(lean(shape, **options))


def _contractive(shape: Shape) -> nn.Module:
    return lf.Contractive(lean(shape), coeff=0.9, seq_len=shape.length)


def _x_transformers(shape: Shape, *, flash: bool) -> nn.Module:
    """Attention of x-transformers with untied L2 logits; raises ImportError where it is missing."""
    with warnings.catch_warnings():
        # It still decorates a function with torch.jit.script.
        warnings.simplefilter("ignore", DeprecationWarning)
        from x_transformers.x_transformers import Attention
    width = shape.dim // shape.heads
    layer: nn.Module = Attention(
        shape.dim, heads=shape.heads, dim_head=width, causal=True, flash=flash, l2_distance=True
    )
    return layer


@dataclass(frozen=True)
class Variant:
    """A row of the benchmark: how it is called and built, and whether it makes N x N tensors."""

    key: str
    label: str
    build: Callable[[Shape], nn.Module]
    dense: bool = False


VARIANTS = (
    Variant("mha", "nn.MultiheadAttention", TorchAttention),
    Variant("sdpa", "dot-product layer on SDPA", DotProductAttention),
    Variant("lean", "L2, lean form", _ours),
    Variant("paper", "L2, paper form", partial(_ours, value_proj=True)),
    Variant("lean_alibi", "L2, lean, ALiBi", partial(_ours, positions="alibi")),
    Variant("lean_coeff", "L2, lean, proj_coeff=1", partial(_ours, proj_coeff=1.0)),
    Variant("contractive", "L2, lean, Contractive", _contractive),
    Variant("cdist", "L2 by torch.cdist", CdistAttention, dense=True),
    Variant(
        "xt_flash", "x-transformers L2, flash=True", partial(_x_transformers, flash=True), dense=True
    ),
    Variant(
        "xt_dense", "x-transformers L2, flash=False", partial(_x_transformers, flash=False), dense=True
    ),
    Variant("bounds", "two spectral bounds alone", BoundsAlone),
)


def variant(key: str) -> Variant:
    """The variant of that key."""
    return next(candidate for candidate in VARIANTS if candidate.key == key)
