"""Dot-product attention of an existing model replaced by L2 attention that starts near it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lipformer.layers.attention.multihead import L2MultiheadAttention

# Eigenvalues below this share of the largest are raised to it, so that every column of W carries values.
_LEAST_EIGENVALUE = 1e-2
# Names under which attention over another sequence is kept.
_CROSS = ("multihead_attn", "cross_attn", "cross_attention", "crossattention", "encoder_attn")


def convert_attention(model: nn.Module, **kwargs: Any) -> nn.Module:
    r"""Turns every nn.MultiheadAttention used for self-attention into L2MultiheadAttention.

    Each head starts as the tied L2 attention closest to its dot-product attention:

    * Its logits are :math:`x_i S x_j^\top / \sqrt d` with :math:`S = W_Q W_K^\top`, those of L2
      attention :math:`2t\,x_i W W^\top x_j^\top` minus a term of the key's norm (and a constant per
      row). W comes from the eigendecomposition of the symmetric part of S, its d largest eigenvalues
      kept: the nearest positive semidefinite matrix of rank d. The antisymmetric part, the negative
      eigenvalues and the biases of query and key have no counterpart and are lost.
    * Values must be linear in the keys, so that the head's map :math:`W_V W_O` becomes
      :math:`W M` with the least-squares :math:`M = W^+ W_V W_O`; what is orthogonal to W is lost.
    * The bias of the values passes through attention unchanged and joins the output's bias.

    The result is a starting point for fine-tuning, not the same function. Where a model calls the
    attention with two different sequences, the new layer raises ValueError.

    Args:
        model: any module; it is changed in place (unless it is itself an nn.MultiheadAttention).
            Cross-attention (in nn.TransformerDecoderLayer, or by its name, or because keys have
            another width) and layers with add_bias_kv or add_zero_attn are left as they are and named
            in a warning.
        kwargs: options of L2MultiheadAttention, such as causal or positions.

    Returns:
        The model, with device, dtype, dropout, batch_first and mode of each layer kept.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> type(convert_attention(layer).self_attn).__name__
        'L2MultiheadAttention'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert_attention takes a torch.nn.Module, got {type(model).__name__}")
    fixed = {"embed_dim", "num_heads", "dropout", "bias", "batch_first", "device", "dtype"} & set(kwargs)
    if fixed:
        raise ValueError(f"{', '.join(sorted(fixed))} is taken from each layer and cannot be given")
    if isinstance(model, nn.MultiheadAttention):
        reason = _left_because(model, "")
        if reason is not None:
            raise ValueError(f"this attention cannot be converted: {reason}")
        return _converted(model, kwargs)
    done: dict[nn.MultiheadAttention, L2MultiheadAttention] = {}
    left = []
    for path, parent, name, layer in list(_attentions(model)):
        reason = _left_because(layer, name)
        if reason is not None:
            left.append(f"{path} ({reason})")
            continue
        if layer not in done:
            done[layer] = _converted(layer, kwargs)
        setattr(parent, name, done[layer])
    if left:
        warnings.warn(f"left as dot-product attention: {', '.join(left)}", stacklevel=2)
    return model


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.MultiheadAttention]]:
    """Path, parent, name and layer of every nn.MultiheadAttention, each use of a shared one."""
    for prefix, parent in model.named_modules():
        for name, child in parent._modules.items():
            if isinstance(child, nn.MultiheadAttention):
                yield f"{prefix}.{name}".lstrip("."), parent, name, child


def _left_because(layer: nn.MultiheadAttention, name: str) -> str | None:
    """Why a layer is left as it is, or None."""
    if name in _CROSS or not layer._qkv_same_embed_dim:
        return "cross-attention"
    if layer.bias_k is not None or layer.add_zero_attn:
        return "it adds keys of its own"
    return None


@torch.no_grad()
def _converted(layer: nn.MultiheadAttention, options: dict[str, Any]) -> L2MultiheadAttention:
    weight = layer.in_proj_weight
    new = L2MultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        layer.dropout,
        bias=layer.in_proj_bias is not None,
        batch_first=layer.batch_first,
        device=weight.device,
        dtype=weight.dtype,
        **options,
    )
    heads = layer.num_heads
    q, k, v = (part.double().unflatten(0, (heads, -1)).mT for part in weight.chunk(3))  # (H, D, d)
    o = layer.out_proj.weight.double().mT.unflatten(0, (heads, -1))  # (H, d, D)
    wanted = tied_projection(q, k)
    _assign(new.q_proj, wanted.mT.flatten(0, 1))
    # With proj_coeff the weight has another size than the one assigned; the temperature makes up for it.
    tied = new.q_proj.weight.double().unflatten(0, (heads, -1)).mT
    if new.log_temperature is not None:
        ratio = wanted.norm() / tied.norm()
        new.log_temperature.copy_((ratio.square() * new.head_dim**-0.5).log().expand(heads))
    if new.v_proj is None:
        _assign(new.out_proj, value_map(tied, v @ o).flatten(0, 1).mT)
    else:
        # The paper's values are x W W^T W_V / sqrt(d).
        image = tied @ tied.mT * new.head_dim**-0.5
        paper = torch.linalg.pinv(image, hermitian=True, rtol=1e-9) @ v
        _assign(new.v_proj, paper.mT.flatten(0, 1))
        _assign(new.out_proj, layer.out_proj.weight)
    if new.out_proj.bias is not None and layer.in_proj_bias is not None:
        values = layer.in_proj_bias.double().chunk(3)[2] @ layer.out_proj.weight.double().mT
        new.out_proj.bias.copy_(layer.out_proj.bias.double() + values)
    return new.train(layer.training)


def tied_projection(q: Tensor, k: Tensor) -> Tensor:
    r"""W (*, D, d) with :math:`2 W W^\top` the nearest positive semidefinite rank d to sym(Q K^T).

    Eigenvalues below a hundredth of the largest are raised to it. With :math:`t = 1/\sqrt d` the
    logits then agree with those of dot-product attention up to what :func:`convert_attention` names.

    Args:
        q: Q (*, D, d).
        k: K (*, D, d).
    """
    product = q @ k.mT
    values, vectors = torch.linalg.eigh((product + product.mT) / 2.0)
    d = q.shape[-1]
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
