"""The effect of each token on itself in causal L2 attention, in closed form (Theorem E)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lipformer.layers.attention.key_ball import push_bounded
from lipformer.layers.attention.multihead import L2MultiheadAttention
from lipformer.layers.attention.positions import rotate
from lipformer.layers.branch import Call
from lipformer.layers.own_token import register_own_token

# Entries of the differences y_j - y_i that are held at once.
_BUDGET = 2**22


class OwnRows(NamedTuple):
    """Rows of causal L2 attention and their derivatives by their own token.

    Attributes:
        heads: g_i (B, H, n, d).
        weight: P_ii (B, H, n).
        covariance: C_i = Cov_i(y) (B, H, n, d, d).
    """

    heads: Tensor
    weight: Tensor
    covariance: Tensor


def own_rows(
    y: Tensor,
    *,
    window: int | None = None,
    slopes: Tensor | None = None,
    padding: Tensor | None = None,
) -> OwnRows:
    r"""Causal L2 attention at temperature 1/2 with :math:`J_{ii} = P_{ii} I + C_i` (docs/theory, (3)).

    .. math:: g_i = y_i + \sum_j P_{ij} \delta_j, \qquad
        C_i = \sum_j P_{ij} \delta_j \delta_j^\top - (g_i - y_i)(g_i - y_i)^\top, \qquad
        \delta_j = y_j - y_i

    From the differences to the own token, whose weighted squares are bounded whatever the scale of the
    input; :math:`\sum_j P_{ij} y_j y_j^\top - g_i g_i^\top` would cancel. Memory B T^2 D, in chunks of
    queries that a backward pass recomputes.

    Args:
        y: keys (B, H, T, d) at temperature 1/2: :math:`\sqrt{2t}` times those at temperature t, which
            have the same J_ii.
        window: latest keys kept, or None.
        slopes: ALiBi slopes (H,) or None.
        padding: (B, T), True at padded tokens, whose rows are zero, or None.
    """
    batch, heads, count, width = y.shape
    chunk = max(1, _BUDGET // max(1, batch * heads * count * width))
    parts = []
    for start in range(0, count, chunk):
        stop = min(count, start + chunk)
        if chunk < count and torch.is_grad_enabled():
            part = checkpoint(
                _rows, y, start, stop, window, slopes, padding,
                use_reentrant=False, preserve_rng_state=False,
            )  # fmt: skip
        else:
            part = _rows(y, start, stop, window, slopes, padding)
        parts.append(part)
    return OwnRows(*(torch.cat(column, dim=2) for column in zip(*parts, strict=True)))


def _rows(
    y: Tensor,
    start: int,
    stop: int,
    window: int | None,
    slopes: Tensor | None,
    padding: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`own_rows` for the queries start to stop."""
    first = 0 if window is None else max(0, start - window + 1)
    y = y.to(torch.promote_types(y.dtype, torch.float32))
    own = y[:, :, start:stop]
    difference = y[:, :, None, first:stop] - own.unsqueeze(-2)
    place = torch.arange(first, stop, device=y.device)
    lag = place[start - first :, None] - place
    logits = -0.5 * difference.square().sum(-1)
    if slopes is not None:
        logits = logits - slopes.to(y.dtype)[:, None, None] * lag
    hidden = lag < 0 if window is None else (lag < 0) | (lag >= window)
    if padding is not None:
        # Not the own key, so that no row is empty.
        hidden = hidden | (padding[:, None, None, first:stop] & (lag != 0))
    p = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    weighted = p.unsqueeze(-1) * difference
    shift = weighted.sum(-2)
    covariance = weighted.mT @ difference - shift.unsqueeze(-1) * shift.unsqueeze(-2)
    rows, weight = own + shift, p.diagonal(start - first, -2, -1)
    if padding is not None:
        padded = padding[:, None, start:stop]
        rows = rows.masked_fill(padded.unsqueeze(-1), 0.0)
        weight = weight.masked_fill(padded, 0.0)
        covariance = covariance.masked_fill(padded[..., None, None], 0.0)
    return rows, weight, covariance


@register_own_token(L2MultiheadAttention, causal=lambda layer: layer.causal is True)
def push_attention(
    layer: L2MultiheadAttention, x: Tensor, tangents: Tensor, call: Call
) -> tuple[Tensor, Tensor]:
    r"""Causal attention and its own-token blocks times tangents.

    .. math:: J_{ii} = \sum_h s_h M_h^\top R_i^\top (P_{ii} I + 2 t C_i) R_i B_i W_h^\top

    with :math:`B_i` the derivative of the projection on the ball, if the layer has a key_radius.

    Args:
        layer: causal, batch first.
        x: (B, T, D).
        tangents: (R, B, T, D), R directions for each token.
        call: padding (B, T), and :math:`s_h` (H,) as Contractive sets them, default 1.

    Returns:
        The layer's output (B, T, D) and the tangents pushed forward (R, B, T, D).
    """
    x, padding = layer._batched(x, call.key_padding_mask)
    keys = layer._keys(x, 0)
    rows = own_rows(keys.y, window=layer.window, slopes=layer._slopes(keys.y), padding=padding)
    out = layer._output(rows.heads.to(x.dtype), keys, call.head_scale)
    # The linear part of _keys; that of _output is what it does without a bias.
    moved = F.linear(tangents, keys.weight).unflatten(-1, (layer.num_heads, -1))
    curb = layer.curb()
    if keys.free is not None and curb is not None:
        moved = push_bounded(keys.free, curb, layer.smooth_radius, moved)
    moved = moved.transpose(2, 3)
    if keys.angles is not None:
        moved = rotate(moved, *keys.angles)
    bent = torch.einsum("bhnde,rbhne->rbhnd", rows.covariance, moved.to(rows.covariance.dtype))
    moved = (rows.weight.unsqueeze(-1) * moved + bent).to(x.dtype)
    pushed = F.linear(*layer._read_out(moved.flatten(0, 1), keys, call.head_scale))
    return out, pushed.unflatten(0, tangents.shape[:2])
