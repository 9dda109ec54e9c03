"""Attention with a certificate that starts near a dot-product attention."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lipformer.layers.attention.multihead import L2MultiheadAttention
from lipformer.layers.attention.null_key import NullKeyAttention

# Eigenvalues below this share of the largest are raised to it, so that every column of W carries values.
_LEAST_EIGENVALUE = 1e-2
# How much values count in the logits of attention with a null key: little at first.
_VALUE_SCALE = 0.3


class DotProduct(NamedTuple):
    """The weights of dot-product attention of D features and H heads.

    Attributes:
        q: :math:`W_Q` (H, D, e) of width e, mostly d.
        k: :math:`W_K` (H, D, e).
        v: :math:`W_V` (H, D, f) of width f, mostly d.
        o: :math:`W_O` (H, f, D).
        q_bias: (H e,), or None.
        k_bias: (H e,), or None.
        v_bias: (H f,), or None.
        bias: of the output (D,), or None.
        scale: s, of the logits.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    bias: Tensor | None
    scale: float


@torch.no_grad()
def start_near(layer: L2MultiheadAttention, given: DotProduct) -> None:
    r"""Sets the weights of L2 attention near those of dot-product attention.

    Dot-product attention has the logits :math:`s\,x_i S x_j^\top` with :math:`S = W_Q W_K^\top`, L2
    attention :math:`2t\,x_i W W^\top x_j^\top` minus a term of the key's norm (and a constant per row),
    where t starts at :math:`1/\sqrt d`. W is :func:`tied_projection` of :math:`s \sqrt d\, W_Q` and
    :math:`W_K`. Values must be linear in the keys, so that the head's map :math:`W_V W_O` becomes
    :math:`W M`, M being :func:`value_map`. Weights that sum to one pass on the bias of the values.
    """
    heads, d = layer.num_heads, layer.head_dim
    q, k, v, o = (part.double() for part in given[:4])
    wanted = tied_projection(given.scale * d**0.5 * q, k, d)
    _assign(layer.q_proj, wanted.mT.flatten(0, 1))
    # With proj_coeff the weight has another size than the one assigned; the temperature makes up for it.
    tied = layer.q_proj.weight.double().unflatten(0, (heads, -1)).mT
    if layer.log_temperature is not None:
        ratio = wanted.norm() / tied.norm()
        layer.log_temperature.copy_((ratio.square() * d**-0.5).log().expand(heads))
    if layer.v_proj is None:
        _assign(layer.out_proj, value_map(tied, v @ o).flatten(0, 1).mT)
    else:
        if v.shape[-1] != d:
            left, sizes, right = torch.linalg.svd(v @ o, full_matrices=False)
            v, o = left[..., :d] * sizes[:, None, :d], right[:, :d]
        # The paper's values are x W W^T W_V / sqrt(d).
        image = tied @ tied.mT * d**-0.5
        paper = torch.linalg.pinv(image, hermitian=True, rtol=1e-9) @ v
        _assign(layer.v_proj, paper.mT.flatten(0, 1))
        _assign(layer.out_proj, o.flatten(0, 1).mT)
    if given.bias is not None:
        layer.out_proj.bias.copy_(given.bias)
    if given.v_bias is not None:
        layer.out_proj.bias.add_(given.v_bias.double() @ given.o.double().flatten(0, 1))


@torch.no_grad()
def start_near_untied(layer: NullKeyAttention, given: DotProduct) -> None:
    r"""Sets the weights of attention with a null key to those of dot-product attention.

    :math:`-t\|q_i - k_j\|^2` is :math:`s\,q_i \cdot k_j` for :math:`t = s/2`, minus the norms. Distances
    see the difference of the two biases alone.
    """
    for linear, weight in zip((layer.q_proj, layer.k_proj, layer.v_proj), given[:3], strict=True):
        linear.weight.copy_(weight.mT.flatten(0, 1))
    layer.out_proj.weight.copy_(given.o.flatten(0, 1).mT)
    layer.log_temperature.fill_(math.log(given.scale / 2.0))
    layer.log_value_scale.fill_(math.log(_VALUE_SCALE))
    for bias, own, sign in (
        (given.q_bias, layer.q_proj.bias, 1.0),
        (given.k_bias, layer.q_proj.bias, -1.0),
        (given.v_bias, layer.v_proj.bias, 1.0),
        (given.bias, layer.out_proj.bias, 1.0),
    ):
        if bias is not None:
            own.add_(bias, alpha=sign)


def tied_projection(q: Tensor, k: Tensor, width: int | None = None) -> Tensor:
    r"""W (*, D, d) with :math:`2 W W^\top` the nearest positive semidefinite rank d to sym(Q K^T).

    Eigenvalues below a hundredth of the largest are raised to it. With :math:`t = 1/\sqrt d` the
    logits then agree with those of dot-product attention up to what :func:`convert_attention` names.

    Args:
        q: Q (*, D, e).
        k: K (*, D, e).
        width: d, default e.
    """
    product = q @ k.mT
    values, vectors = torch.linalg.eigh((product + product.mT) / 2.0)
    d = q.shape[-1] if width is None else width
    values, vectors = values[..., -d:], vectors[..., -d:]
    top = values[..., -1:]
    # Where nothing is positive there is no kernel to keep: a flat one, of the size of a fresh layer.
    top = torch.where(top > 0.0, top, torch.full_like(top, 1.0 / q.shape[-2]))
    return vectors * (torch.maximum(values, _LEAST_EIGENVALUE * top) / 2.0).sqrt().unsqueeze(-2)


def value_map(tied: Tensor, values: Tensor) -> Tensor:
    r"""The M (*, d, D) that minimises :math:`\|W M - V\|_F`, for W (*, D, d) and V (*, D, D)."""
    return torch.linalg.lstsq(tied, values).solution


def _assign(layer: nn.Linear, weight: Tensor) -> None:
    """Sets the weight of a linear layer, the raw one of a bounded layer."""
    next(p for p in layer.parameters() if p.ndim == 2).copy_(weight)
