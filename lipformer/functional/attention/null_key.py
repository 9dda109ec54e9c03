r"""L2 attention with weights of its own for queries, keys and values, and a null key for each query."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lipformer.functional.attention.augment import PADDED, norm_units, split_in_units
from lipformer.functional.attention.checks import as_padding, check_scale, check_tokens, expand_bias
from lipformer.functional.attention.fused import differentiable_backend, kernel_dtype
from lipformer.functional.attention.reference import gather_tokens, reference_point, sample_positions
from lipformer.functional.tracing import values_readable


def null_key_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | Tensor | None = None,
    value_scale: float | Tensor = 1.0,
    is_causal: bool = False,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    r"""Computes untied L2 attention where each query also sees itself, as a key of value zero.

    .. math:: g_i = \frac{\sum_j w_{ij} v_j}{1 + \sum_j w_{ij}}, \qquad
        w_{ij} = \exp\left(-t \left(\|q_i - k_j\|^2 + \epsilon^2 \|v_j\|^2\right) + b_{ij}\right)

    It is tied L2 attention of 2N points, :math:`a_i = (q_i, 0)` and :math:`b_j = (k_j, \epsilon v_j)`,
    of which :math:`a_i` sees itself and every :math:`b_j`; so it has a Lipschitz constant, which untied
    attention without the null key has not (Theorem U, this project's own; docs/theory, section 2).

    Runs on :func:`torch.nn.functional.scaled_dot_product_attention` like :func:`l2_attention`, by the
    same columns: the null key is one more key, the same for all queries, whose logit
    :math:`t\|q_i\|^2` comes from two columns of the query.

    Args:
        q: (*, H, T, d).
        k: (*, H, S, d); with ``is_causal`` the queries are those of the last T tokens.
        v: (*, H, S, e).
        scale: temperature :math:`t`, a float or a tensor (H, 1, 1); default :math:`d^{-1/2}`.
        value_scale: :math:`\epsilon > 0`, likewise.
        is_causal: a query sees the keys up to its own token.
        bias: :math:`b \le 0`, broadcastable to (*, H, T, S); -inf hides a key, any or all of them.
        key_padding_mask: (*, S), bool with True at padded tokens, or float with -inf there.
        dropout_p: probability of dropping an attention weight.

    Returns:
        :math:`g` (*, H, T, e) in the dtype of the operands (under autocast in autocast's).

    Example:
        >>> zero, one = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
        >>> null_key_attention(zero, zero, one, scale=1.0, value_scale=1e-3).squeeze()
        tensor(0.5000)
    """
    _check(q, k, v, is_causal)
    check_scale(scale, q.shape[-3])
    check_scale(value_scale, q.shape[-3], "value_scale")
    padding, bias = as_padding(key_padding_mask, k), _lowering(bias, q, k)
    dtype = kernel_dtype(q)
    wide = torch.promote_types(dtype, torch.float32)
    temperature = q.shape[-1] ** -0.5 if scale is None else scale
    root: float | Tensor
    if isinstance(temperature, Tensor):
        root = (2.0 * temperature).to(wide).sqrt()
    else:
        root = math.sqrt(2.0 * temperature)
    centre = _centre(k, padding, is_causal).to(wide)
    a = ((q.to(wide) - centre) * root).to(dtype)
    b = (k.to(wide) - centre) * root
    if padding is not None:
        # Whatever stands there, NaN included, counts nothing.
        b, v = (x.masked_fill(padding[..., None, :, None], 0.0) for x in (b, v))
    b = b.to(dtype)
    units = norm_units(dtype)
    depth = -0.5 * (_squares(b, wide) + _squares(v.to(wide) * value_scale * root, wide))
    if padding is not None:
        depth = depth.masked_fill(padding[..., None, :, None], -PADDED)
    # Filled, not copied from the host.
    fixed = torch.stack([a.new_full((), unit) for unit in units])
    queries = [
        a,
        fixed.expand(*a.shape[:-1], -1),
        *split_in_units(0.5 * _squares(a, wide), dtype, units),
    ]
    keys = [b, *split_in_units(depth, dtype, units), b.new_zeros(*b.shape[:-1], len(units))]
    # Fused kernels want one width for all three, a multiple of 8.
    width = -(-max(b.shape[-1] + 2 * len(units), v.shape[-1]) // 8) * 8
    null = F.pad(fixed, (b.shape[-1] + len(units), 0)).expand(*b.shape[:-2], 1, -1)
    query = _padded(torch.cat(queries, dim=-1), width)
    key = torch.cat([_padded(null, width), _padded(torch.cat(keys, dim=-1), width)], dim=-2)
    value = F.pad(v.to(dtype), (0, width - v.shape[-1], 1, 0))
    with differentiable_backend():
        out = _kernel(query, key, value, is_causal, bias, dropout_p)
    return out[..., : v.shape[-1]]


def _check(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    for name, tokens in (("q", q), ("k", k), ("v", v)):
        check_tokens(tokens, name)
    t, s = q.shape[-2], k.shape[-2]
    fits = q.shape[:-2] == k.shape[:-2] == v.shape[:-2] and q.shape[-1] == k.shape[-1]
    if not fits or v.shape[-2] != s or (is_causal and t > s):
        raise ValueError(
            "q must be (*, H, T, d), k (*, H, S, d) and v (*, H, S, e), with T <= S if is_causal, got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} and is_causal={is_causal}"
        )


def _lowering(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias; raises unless it only lowers logits (where values are not read, it becomes NaN)."""
    if bias is None:
        return None
    bias = expand_bias(bias, (*q.shape[:-1], k.shape[-2]), "(*, H, T, S)")
    lowers = bias <= 0.0
    if not values_readable(bias):
        return bias.masked_fill(~lowers, torch.nan)
    if not bool(lowers.all()):
        raise ValueError(
            "bias may only lower logits, which is what the certificate covers: entries must be <= 0, "
            f"got {bias[~lowers][0].item()}"
        )
    return bias


def _centre(k: Tensor, padding: Tensor | None, is_causal: bool) -> Tensor:
    """A point among the keys, detached; distances do not see it, their rounding does.

    The first key in causal attention, in every row of which it is seen.
    """
    if not is_causal:
        return reference_point(k, padding, is_causal=False)
    if padding is None:
        return k[..., :1, :].detach()
    return gather_tokens(k.detach(), sample_positions(padding, 1, spread=False))


def _squares(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).square().sum(-1, keepdim=True)


def _padded(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1]))


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, bias: Tensor | None, dropout_p: float
) -> Tensor:
    """Attention of queries (*, H, T, E) over the null key and S others."""
    t, s = query.shape[-2], key.shape[-2] - 1
    lead = query.shape[:-3]
    square = is_causal and bias is None and t == s
    if square:
        # One more query in front, for the null key, and the mask is torch's causal one.
        query = F.pad(query, (0, 0, 1, 0))
    mask: Tensor | None = None
    if bias is not None:
        mask = F.pad(bias.to(query.dtype), (1, 0))
    if is_causal and not square and t > 1:
        seen = torch.ones(t, s + 1, dtype=torch.bool, device=query.device).tril(s - t + 1)
        mask = seen if mask is None else mask.masked_fill(~seen, -torch.inf)
    if mask is not None and mask.ndim > 2:
        mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4) if lead else mask
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=square, scale=1.0
    )
    out = out[..., 1:, :] if square else out
    return out.reshape(*lead, *out.shape[-3:])
