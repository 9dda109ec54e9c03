r"""The bound of L2 multi-head attention (docs/theory, section 2).

:math:`F(X) = \sum_h P_h(Y_h) Y_h M_h` with :math:`Y_h = X W_h`: a gain :math:`G_h` for each head,
the rest linear. Beside it the layer's other rules: division head by head, baking, steps.
"""

from __future__ import annotations

import copy
import math

import torch
from einops import rearrange
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.certificate.linear_rules import linf_norm
from lipformer.functional import l2_gain, row_spread, spectral_norm_bound
from lipformer.functional.rounding import enlarge
from lipformer.layers.attention.key_cache import KeyCache
from lipformer.layers.attention.multihead import L2MultiheadAttention
from lipformer.layers.branch import Call
from lipformer.layers.decoding import register_step
from lipformer.layers.layer import plain_linear, register_bake
from lipformer.layers.per_head import PerHead, per_head


def _norm(weight: Tensor) -> Tensor:
    # The factor covers the rounding of a float64 product that formed the weight.
    return enlarge(spectral_norm_bound(weight).double())


def joint_bound(q: Tensor, m: Tensor, gains: Tensor) -> Tensor:
    r""":math:`\|[W_1 \dots W_H]\| \cdot \|\mathrm{stack}_h(G_h M_h)\|`, l2 and self norms.

    Heads act on disjoint columns of Y, so that together they have constant 1 once each is divided by
    its gain: up to sqrt(H) tighter than a sum over heads.

    Args:
        q: query-key weight (H, d, D), head h maps x to q[h] x.
        m: output matrices (H, d, D).
        gains: :math:`G_h` (H,).
    """
    return _norm(q.flatten(0, 1)) * _norm((gains[:, None, None] * m).flatten(0, 1))


def joint_bound_minimum(q: Tensor, m: Tensor, gains: Tensor) -> Tensor:
    r"""The smallest :func:`joint_bound` over several ways of sharing a factor per head.

    For any :math:`a_h > 0` head h may read :math:`a_h W_h` and write :math:`(G_h/a_h) M_h`. Tried:
    :math:`a = 1`, :math:`a = G`, the balance of each head's own norms, and the sum over heads of
    :math:`G_h \|W_h\| \|M_h\|`, which is smaller when one head dominates.
    """
    own_q, own_m = _norm(q), _norm(m)
    one = torch.ones_like(gains)
    tiny = torch.finfo(torch.float64).tiny
    balance = ((gains * own_m).clamp_min(tiny) / own_q.clamp_min(tiny)).sqrt().clamp(1e-6, 1e6)
    ways = [
        joint_bound(a[:, None, None] * q.double(), m.double() / a[:, None, None], gains)
        for a in (one, gains, balance)
    ]
    ways.append((gains * own_q * own_m).sum())
    return torch.stack(ways).amin()


def token_bound(q: Tensor, m: Tensor, gains: Tensor) -> Tensor:
    r"""Theorem D for H heads: :math:`\|M\| \sqrt{\sum_h G_h^2 \|W_h\|^2}`."""
    return _norm(m.flatten(0, 1)) * (gains * _norm(q)).square().sum().sqrt()


def token_bound_minimum(q: Tensor, m: Tensor, gains: Tensor) -> Tensor:
    r"""The smallest of Theorem D with the gains on either side, and the sum over heads."""
    own = _norm(q)
    ways = [
        token_bound(q, m, gains),
        _norm((gains[:, None, None] * m).flatten(0, 1)) * own.square().sum().sqrt(),
        (gains * own * _norm(m)).sum(),
    ]
    return torch.stack(ways).amin()


def linf_bound_lean(q: Tensor, m: Tensor, spreads: Tensor) -> Tensor:
    r"""The paper's l_inf argument for the lean form, at any temperature.

    A head's Jacobian P + 2C + 2T has absolute row sums of at most
    :math:`1 + 2\sqrt d\,m + 2\sqrt d\,m`, since :math:`\|v\|_1 \le \sqrt d \|v\|` and each second
    moment of a row is at most m. So
    :math:`\max_{\text{row}} \sum_h (1 + 4 \sqrt d\, m_h) \|W_h^\top\|_\infty |M_h^\top|_{\text{row}}`.

    Args:
        q: (H, d, D).
        m: (H, d, D).
        spreads: :math:`m_h` of each head (H,).
    """
    d = q.shape[1]
    head = (1.0 + 4.0 * math.sqrt(d) * spreads) * linf_norm(q)
    rows = (head[:, None, None] * m.double().abs()).sum((0, 1))
    return enlarge(rows.amax(), q.shape[0] * d + 8)


def linf_bound_kim2021(q: Tensor, v: Tensor, o: Tensor, spreads: Tensor) -> Tensor:
    r"""Kim et al. 2021, Theorem 3.2 in l_inf.

    .. math:: \left(4m + \tfrac{1}{\sqrt d}\right) \|W^{O\top}\|_\infty
        \max_h \|W_h\|_\infty \|W_h^\top\|_\infty \max_h \|W^{V\top}_h\|_\infty

    Args:
        q: (H, d, D), the transposes of :math:`W_h`.
        v: (H, d, D), the transposes of :math:`W^V_h`.
        o: out_proj's weight (D, D), the transpose of :math:`W^O`.
        spreads: :math:`m_h` (H,).
    """
    d = q.shape[1]
    pair = (linf_norm(q.mT) * linf_norm(q)).amax()
    return (4.0 * spreads.amax() + d**-0.5) * linf_norm(o) * pair * linf_norm(v).amax()


def length(layer: L2MultiheadAttention, ask: Ask) -> float:
    """The number of keys to certify for: the question's, the layer's, or any (math.inf)."""
    if ask.seq_len is not None and layer.max_len is not None and ask.seq_len > layer.max_len:
        raise ask.refuse(
            f"seq_len={ask.seq_len} exceeds the layer's max_len={layer.max_len}",
            f"seq_len <= {layer.max_len}, or a layer with a larger max_len",
        )
    n = ask.seq_len if ask.seq_len is not None else layer.max_len
    if n is not None:
        return n
    if layer.window is None and layer.slopes is None:
        raise ask.refuse(
            "the gain of attention grows with the number of tokens, and none was given",
            "seq_len=N, or a layer with max_len=N, a window, or positions='alibi'",
        )
    return math.inf


def head_gains(layer: L2MultiheadAttention, ask: Ask) -> tuple[float, ...]:
    """The gain G_h of each head in the norm asked for (docs/theory, section 2)."""
    n = length(layer, ask)
    if ask.norm == "self" and layer.causal is not True:
        raise ask.refuse(
            "the self norm (Theorem E) needs a causal layer", "causal=True, or norm='l2' or 'token'"
        )
    causal = layer.causal is True
    slopes = layer.slopes or (None,) * layer.num_heads
    gains = tuple(
        l2_gain(n, norm=ask.norm, is_causal=causal, window=layer.window, slope=slope) for slope in slopes
    )
    extra = []
    if layer.causal is None:
        extra.append(l2_gain(n, norm=ask.norm, is_causal=True))
    if layer.any_mask and ask.norm == "l2":
        # Any 0/1 mask with so many ones in a row or column.
        extra.append(l2_gain(n if layer.window is None else min(n, layer.window), theorem="any mask"))
    return tuple(max([gain, *extra]) for gain in gains)


def head_spreads(layer: L2MultiheadAttention, ask: Ask) -> tuple[float, ...]:
    """The row quantity m_h of each head: any mask only lowers it."""
    n = length(layer, ask)
    keys = n if layer.window is None else min(n, layer.window)
    return tuple(
        row_spread(keys, slope=slope or None) for slope in layer.slopes or (0.0,) * layer.num_heads
    )


def theorem(layer: L2MultiheadAttention, norm: str) -> str:
    """Which theorem gives the gain."""
    if norm == "linf":
        return "Kim et al. 2021 (l_inf)" if layer.v_proj is not None else "Kim et al. 2021, lean form"
    if norm == "token":
        return "Theorem D"
    if norm == "self":
        return "Theorem E"
    return "Theorem G (any mask)" if layer.any_mask else "Theorem G"


def attention_bound(layer: L2MultiheadAttention, ask: Ask, head_scale: Tensor | None = None) -> Tensor:
    """The bound of the layer, with each head's output times ``head_scale`` (H,), default 1."""
    ask.along(-2 if layer.batch_first else 0)
    if layer.training and layer.dropout > 0 and not ask.in_forward:
        raise ask.refuse(
            f"attention dropout of {layer.dropout} is random in training mode",
            "model.eval() before certify, or dropout=0",
        )
    q = rearrange(layer.q_proj.weight, "(h d) i -> h d i", h=layer.num_heads)
    m = layer.output_matrix()
    if head_scale is not None:
        m = m.double() * head_scale.double()[:, None, None]
    value: Tensor
    if ask.norm == "linf":
        if layer.positions == "rotary":
            raise ask.refuse("rotations are no isometries in the linf norm", "norm='l2' or 'token'")
        spreads = layer.constants(head_spreads(layer, ask), q.device)
        value = linf_bound_lean(q, m, spreads) if head_scale is not None else _linf(layer, q, m, spreads)
    else:
        gains = layer.constants(head_gains(layer, ask), q.device)
        smallest = token_bound_minimum if ask.norm == "token" else joint_bound_minimum
        value = smallest(q, m, gains)
        if head_scale is not None:
            gains = gains * head_scale.double()
        value = value + _folding_error(layer) * gains.amax() * q.double().norm()
    return value


def _linf(layer: L2MultiheadAttention, q: Tensor, m: Tensor, spreads: Tensor) -> Tensor:
    """The l_inf bound: the published one for the paper's form, its twin for the lean form."""
    if layer.v_proj is None:
        return linf_bound_lean(q, m, spreads)
    v = rearrange(layer.v_proj.weight, "(h d) i -> h d i", h=layer.num_heads)
    return linf_bound_kim2021(q, v, layer.out_proj.weight, spreads)


def _folding_error(layer: L2MultiheadAttention) -> Tensor | float:
    """Frobenius norm of the rounding error of M in float64 (paper's form), from above.

    A product of three matrices over D and then d terms is off by at most (D + d + 4) 2^-53 of the
    product of their absolute values, hence of their Frobenius norms.
    """
    if layer.v_proj is None:
        return 0.0
    norms = layer.q_proj.weight.double().norm() * layer.v_proj.weight.double().norm()
    unit = 2.0**-52 * (layer.embed_dim + layer.head_dim + 4)
    return unit * norms * layer.out_proj.weight.double().norm()


def head_matrices(layer: L2MultiheadAttention, norms: tuple[str, ...]) -> list[Tensor]:
    """The matrices that :func:`contractive_head_bounds` needs the spectral norms of, in these norms.

    The query-key weights of the heads (H, d, D) for "token", the same as one matrix (D, D) for "l2" and
    "self", and with either the output matrices as one.
    """
    q = layer.q_proj.weight
    found = [rearrange(q, "(h d) i -> h d i", h=layer.num_heads)] if "token" in norms else []
    if "l2" in norms or "self" in norms:
        found.append(q)
    return [*found, layer.output_matrix().flatten(0, 1)] if found else []


def contractive_head_bounds(
    layer: L2MultiheadAttention, asks: list[Ask], norms: list[Tensor]
) -> list[Tensor]:
    """What the heads are divided by to give the layer constant 1: (H,) for each of the questions.

    Args:
        layer: the attention.
        asks: the questions, one for each norm.
        norms: bounds of the norms of :func:`head_matrices`, and others behind them.
    """
    bounds = []
    matrices = len({"heads" if ask.norm == "token" else "q" for ask in asks if ask.norm != "linf"})
    for ask in asks:
        if ask.norm == "linf":
            q = rearrange(layer.q_proj.weight, "(h d) i -> h d i", h=layer.num_heads)
            spreads = layer.constants(head_spreads(layer, ask), q.device)
            bounds.append(_linf(layer, q, layer.output_matrix(), spreads).expand(layer.num_heads))
            continue
        left = norms[0].square().sum().sqrt() if ask.norm == "token" else norms[matrices - 1]
        right = norms[matrices] if layer.v_proj is None else norms[matrices] + _folding_error(layer)
        # The factor covers the rounding of these products, and of a float64 product that formed m.
        gains = tuple(gain * (1.0 + 4e-12) for gain in head_gains(layer, ask))
        bounds.append(left * right * layer.constants(gains, left.device))
    return bounds


@register_bound(L2MultiheadAttention)
def _(layer: L2MultiheadAttention, ask: Ask) -> Bound:
    root = layer._root()
    if ask.readable(root) and not bool(((root > 0) & torch.isfinite(root)).all()):
        raise ask.refuse(
            f"its temperatures leave the range of {root.dtype}: {layer.log_temperature}",
            "log_temperature between -80 and 80",
        )
    return Bound(attention_bound(layer, ask), theorem(layer, ask.norm))


@register_bake(L2MultiheadAttention)
def bake_attention(
    layer: L2MultiheadAttention, head_scale: Tensor | None = None
) -> L2MultiheadAttention:
    """The layer in the lean form with plain weights, the factors in its output weights."""
    layer = copy.deepcopy(layer)
    matrix = layer.output_matrix()
    if head_scale is not None:
        matrix = matrix * head_scale[:, None, None].to(matrix.dtype)
    out = plain_linear(layer.out_proj)
    out.weight.copy_(rearrange(matrix, "h d o -> o (h d)"))
    if out.bias is not None and head_scale is not None:
        out.bias.mul_(head_scale.mean().to(out.bias.dtype))
    if layer.log_temperature is None:
        start = out.weight.new_full((layer.num_heads,), layer.head_dim**-0.5).log()
        layer.log_temperature = nn.Parameter(start)
    layer.q_proj, layer.out_proj, layer.v_proj = plain_linear(layer.q_proj), out, None
    layer.proj_coeff = None
    return layer


per_head.register(L2MultiheadAttention)(
    PerHead(
        matrices=head_matrices,
        divisors=contractive_head_bounds,
        forward=L2MultiheadAttention.scaled,
        bound=attention_bound,
        bake=bake_attention,
    )
)


@register_step(L2MultiheadAttention)
def _(
    layer: L2MultiheadAttention, x: Tensor, cache: KeyCache | None, call: Call
) -> tuple[Tensor, KeyCache]:
    if layer.causal is not True:
        raise ValueError(f"step needs attention built with causal=True, got {layer.causal}")
    return layer.step(x, cache, call.key_padding_mask, head_scale=call.head_scale)
