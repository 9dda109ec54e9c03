"""The tied L2 attention that is nearest to a dot-product attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipformer.layers.attention.multihead import L2MultiheadAttention

# Eigenvalues below this share of the largest are raised to it, so that every column of W carries values.
_LEAST_EIGENVALUE = 1e-2


@torch.no_grad()
def start_near(
    layer: L2MultiheadAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    scale: float,
    bias: Tensor | None,
) -> None:
    r"""Sets the weights of L2 attention near those of dot-product attention.

    Dot-product attention has the logits :math:`s\,x_i S x_j^\top` with :math:`S = W_Q W_K^\top`, L2
    attention :math:`2t\,x_i W W^\top x_j^\top` minus a term of the key's norm (and a constant per row),
    where t starts at :math:`1/\sqrt d`. W is :func:`tied_projection` of :math:`s \sqrt d\, W_Q` and
    :math:`W_K`. Values must be linear in the keys, so that the head's map :math:`W_V W_O` becomes
    :math:`W M`, M being :func:`value_map`.

    Args:
        layer: of D features and H heads of width d.
        q: :math:`W_Q` (H, D, e) of width e, mostly d.
        k: :math:`W_K` (H, D, e).
        v: :math:`W_V` (H, D, f) of width f, mostly d.
        o: :math:`W_O` (H, f, D).
        scale: s.
        bias: of the output (D,), or None.
    """
    heads, d = layer.num_heads, layer.head_dim
    q, k, v, o = (part.double() for part in (q, k, v, o))
    wanted = tied_projection(scale * d**0.5 * q, k, d)
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
    if layer.out_proj.bias is not None and bias is not None:
        layer.out_proj.bias.copy_(bias)


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
