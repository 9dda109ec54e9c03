r"""The bound of L2 multi-head attention (docs/theory, section 2).

:math:`F(X) = \sum_h P_h(Y_h) Y_h M_h` with :math:`Y_h = X W_h`: a gain :math:`G_h` for each head,
the rest linear. Beside it the layer's other rules: division head by head, baking, steps.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.certificate.linear_rules import linf_norm
from lipformer.certificate.paths import Passage, behind, through, total
from lipformer.functional import l2_gain, row_spread, spectral_norm_bound
from lipformer.functional.rounding import FLOOR, ROUND_UP, UNIT, enlarge, running, running_dtype
from lipformer.functional.spectral.bound import norm_bound
from lipformer.functional.spectral.rounding import frobenius_norm
from lipformer.layers.attention.key_ball import ball_gains
from lipformer.layers.attention.key_cache import KeyCache
from lipformer.layers.attention.multihead import L2MultiheadAttention
from lipformer.layers.attention.self_attention import SelfAttention
from lipformer.layers.branch import Call
from lipformer.layers.decoding import register_step
from lipformer.layers.layer import linear_of, register_bake
from lipformer.layers.per_head import Divisor, PerHead, per_head
from lipformer.layers.spectral import rounding_margin


def head_norms(weight: Tensor) -> Tensor:
    """Spectral norms of weights (*, m, n), (*) in float64, rounded up."""
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
    return head_norms(q.flatten(0, 1)) * head_norms((gains[:, None, None] * m).flatten(0, 1))


def joint_bound_minimum(q: Tensor, m: Tensor, gains: Tensor) -> Tensor:
    r"""The smallest :func:`joint_bound` over several ways of sharing a factor per head.

    For any :math:`a_h > 0` head h may read :math:`a_h W_h` and write :math:`(G_h/a_h) M_h`. Tried:
    :math:`a = 1`, :math:`a = G`, the balance of each head's own norms, and the sum over heads of
    :math:`G_h \|W_h\| \|M_h\|`, which is smaller when one head dominates.
    """
    own_q, own_m = head_norms(q), head_norms(m)
    one = torch.ones_like(gains)
    tiny = torch.finfo(torch.float64).tiny
    balance = ((gains * own_m).clamp_min(tiny) / own_q.clamp_min(tiny)).sqrt().clamp(1e-6, 1e6)
    ways = [
        joint_bound(a[:, None, None] * q.double(), m.double() / a[:, None, None], gains)
        for a in (one, gains, balance)
    ]
    ways.append((gains * own_q * own_m).sum())
    return torch.stack(ways).amin()


def token_bound_minimum(own: Tensor, m: Tensor, gains: Tensor) -> Tensor:
    r"""The smallest of Theorem D with the gains on either side, and the sum over heads.

    Theorem D for H heads is :math:`\|M\| \sqrt{\sum_h G_h^2 \|W_h\|^2}`.

    Args:
        own: :math:`\|W_h\|` (H,).
        m: output matrices (H, d, D).
        gains: :math:`G_h` (H,).
    """
    ways = [
        head_norms(m.flatten(0, 1)) * (gains * own).square().sum().sqrt(),
        head_norms((gains[:, None, None] * m).flatten(0, 1)) * own.square().sum().sqrt(),
        (gains * own * head_norms(m)).sum(),
    ]
    return torch.stack(ways).amin()


def above_floor(value: Tensor, q: Tensor, m: Tensor) -> Tensor:
    """The bound, which may have left the range of float64 although neither factor is zero."""
    return torch.maximum(value, FLOOR * ((q != 0).any() & (m != 0).any()).double())


def linf_bound_lean(q: Tensor, m: Tensor, spreads: Tensor, growth: float = 1.0) -> Tensor:
    r"""The paper's l_inf argument for the lean form, at any temperature.

    A head's Jacobian P + 2C + 2T has absolute row sums of at most
    :math:`1 + 2\sqrt d\,m + 2\sqrt d\,m`, since :math:`\|v\|_1 \le \sqrt d \|v\|` and each second
    moment of a row is at most m. So
    :math:`\max_{\text{row}} \sum_h (1 + 4 \sqrt d\, m_h) \|W_h^\top\|_\infty |M_h^\top|_{\text{row}}`.

    Args:
        q: (H, d, D).
        m: (H, d, D).
        spreads: :math:`m_h` of each head (H,).
        growth: a factor of it all.
    """
    d = q.shape[1]
    head = (growth + 4.0 * math.sqrt(d) * growth * spreads) * linf_norm(q)
    rows = (head[:, None, None] * m.double().abs()).sum((0, 1))
    return enlarge(rows.amax(), q.shape[0] * d + 8)


def linf_bound_token(q: Tensor, m: Tensor, gains: Tensor) -> Tensor:
    r"""Theorem D between the weights: entries move lengths of tokens, those move entries.

    .. math:: \max_o \sum_h G_h \min\Big( \sqrt D \|W_h\|,
        \big(\textstyle\sum_p (\sum_i |W_{ip}|)^2\big)^{1/2} \Big) \|(M_h)_{\cdot o}\|

    Args:
        q: (H, d, D).
        m: (H, d, D).
        gains: :math:`G_h` of the token norm (H,).
    """
    sums = torch.linalg.vector_norm(q.double().abs().sum(-1), dim=-1)
    read = torch.minimum(math.sqrt(q.shape[-1]) * head_norms(q), sums)
    rows = ((gains * read)[:, None] * torch.linalg.vector_norm(m.double(), dim=1)).sum(0)
    return enlarge(rows.amax(), 2 * q.shape[-1] + 64)


def linf_bound_kim2021(q: Tensor, v: Tensor, o: Tensor, spreads: Tensor, growth: float = 1.0) -> Tensor:
    r"""Kim et al. 2021, Theorem 3.2 in l_inf.

    .. math:: \left(4m + \tfrac{1}{\sqrt d}\right) \|W^{O\top}\|_\infty
        \max_h \|W_h\|_\infty \|W_h^\top\|_\infty \max_h \|W^{V\top}_h\|_\infty

    Args:
        q: (H, d, D), the transposes of :math:`W_h`.
        v: (H, d, D), the transposes of :math:`W^V_h`.
        o: out_proj's weight (D, D), the transpose of :math:`W^O`.
        spreads: :math:`m_h` (H,).
        growth: a factor of it all.
    """
    d = q.shape[1]
    pair = (linf_norm(q.mT) * linf_norm(q)).amax()
    return (4.0 * growth * spreads.amax() + growth * d**-0.5) * linf_norm(o) * pair * linf_norm(v).amax()


def asked_length(layer: SelfAttention, ask: Ask) -> int | None:
    """The number of tokens to certify for: the question's or the layer's; None if neither says."""
    if ask.in_forward and ask.seq_len is not None and (layer.max_len or math.inf) > ask.seq_len:
        raise ask.refuse(
            f"divided for seq_len={ask.seq_len}, it takes longer inputs (max_len={layer.max_len})",
            f"max_len={ask.seq_len}",
        )
    if ask.seq_len is not None and layer.max_len is not None and ask.seq_len > layer.max_len:
        raise ask.refuse(
            f"seq_len={ask.seq_len} exceeds the layer's max_len={layer.max_len}",
            f"seq_len <= {layer.max_len}, or a layer with a larger max_len",
        )
    return ask.seq_len if ask.seq_len is not None else layer.max_len


def length(layer: L2MultiheadAttention, ask: Ask) -> float:
    """The number of keys to certify for: the question's, the layer's, or any (math.inf)."""
    n = asked_length(layer, ask)
    if n is not None:
        return n
    if layer.window is None and layer.slopes is None and not _any_number(layer, ask):
        under = " under a causal mask, which causal=None allows," if layer.bounds_keys else ""
        raise ask.refuse(
            f"the gain of attention{under} grows with the number of tokens, and none was given",
            "seq_len=N, or a layer with max_len=N, a window, ALiBi, or key_radius with causal=False",
        )
    return math.inf


def _any_number(layer: L2MultiheadAttention, ask: Ask) -> bool:
    """Whether key_radius gives a gain for any number of tokens: not under a mask in the l2 norm."""
    return (
        layer.bounds_keys
        and (ask.norm in ("token", "self") or layer.causal is False)
        and not (layer.any_mask and ask.norm == "l2")
    )


def head_gains(
    layer: L2MultiheadAttention, ask: Ask, device: torch.device, growth: float = 1.0
) -> Tensor:
    """The gain G_h of each head in the norm asked for, times ``growth``, (H,) in float64."""
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
    keys = float(n if layer.window is None else min(n, layer.window))
    extra, masks = [], []
    if layer.causal is None:
        extra.append(l2_gain(n, norm=ask.norm, is_causal=True))
        masks.append("causal")
    if layer.any_mask and ask.norm == "l2":
        # Any 0/1 mask with so many ones in a row or column.
        extra.append(l2_gain(keys if keys == math.inf else int(keys), theorem="any mask"))
        masks.append("any")
    turning = _turning(layer, ask)
    growth = growth * turning
    gains = tuple(max([gain, *extra]) * growth for gain in gains)
    log_radius = layer.log_radius()
    if log_radius is None:
        return layer.constants(gains, device)
    heads = tuple(
        (
            tuple(
                (ask.norm, keys, mask, slope or 0.0) for mask in ("causal" if causal else "none", *masks)
            ),
            gain,
        )
        for gain, slope in zip(gains, slopes, strict=True)
    )
    heads = heads[:1] if len(set(heads)) == 1 else heads
    # Rounded keys may leave the ball by half an ulp, and again by turning them.
    return ball_gains(log_radius, heads, growth, (1.0 + _running_eps(layer, ask)) * turning)


def _turning(layer: L2MultiheadAttention, ask: Ask) -> float:
    """What turning by rotary positions and back adds: each cosine and sine is off by half an ulp."""
    return 1.0 if layer.positions != "rotary" else (1.0 + _running_eps(layer, ask) / 2.0) ** 2


def _running_eps(layer: L2MultiheadAttention, ask: Ask) -> float:
    """eps of the dtype that keys have."""
    stored = layer._stored()
    return torch.finfo(stored.dtype if ask.in_forward else running_dtype(stored)).eps


def _refuse_linf(layer: L2MultiheadAttention, ask: Ask) -> None:
    if layer.bounds_keys:
        raise ask.refuse(
            "the projection of keys is no contraction in the linf norm", "norm='l2' or 'token'"
        )


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
        return "Kim et al. 2021 (l_inf)" if layer.v_proj is not None else "Kim et al. 2021 or D"
    if layer.bounds_keys:
        return "Theorem F"
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
    stored = ask.in_forward and not _narrow(layer)
    if stored:
        # Nearly what runs, without a pass over the weights: see _folding_growth.
        q, m = _by_heads(layer, layer.q_proj.weight), layer.output_matrix()
        m = m if head_scale is None else m.double() * head_scale.double()[:, None, None]
    else:
        q, m = effective_weights(layer, head_scale, cast=not ask.in_forward)
    value: Tensor
    if ask.norm == "linf":
        _refuse_linf(layer, ask)
        if layer.positions == "rotary":
            raise ask.refuse("rotations are no isometries in the linf norm", "norm='l2' or 'token'")
        spreads = layer.constants(head_spreads(layer, ask), q.device)
        value = linf_bound_lean(q, m, spreads)
        if layer.v_proj is None:
            gains = head_gains(layer, replace(ask, norm="token"), q.device)
            value = torch.minimum(value, linf_bound_token(q, m, gains))
        elif head_scale is None:
            # The published bound is the larger one, up to the rounding of the weights that run.
            value = torch.maximum(value, _linf(layer, q, m, spreads))
    else:
        gains = head_gains(layer, ask, q.device)
        if layer.bounds_keys and ask.readable(gains) and bool(gains.isinf().any()):
            raise ask.refuse(
                "its radii sqrt(t) R are too large for a gain at any number of tokens: "
                f"log_key_radius={layer.log_key_radius}, log_temperature={layer.log_temperature}",
                "seq_len=N, a layer with max_len=N, or a smaller key_radius",
            )
        if ask.norm == "token":
            value = token_bound_minimum(head_norms(q), m, gains)
        else:
            value = joint_bound_minimum(q, m, gains)
        if head_scale is not None:
            gains = gains * head_scale.double()
        value = value + _folding_error(layer) * gains.amax() * q.double().norm()
    if stored:
        return value * _folding_growth(layer)
    return above_floor(value, q, m)


def scaled_bound(layer: L2MultiheadAttention, ask: Ask, head_scale: Tensor | None = None) -> Bound:
    """:func:`attention_bound`, by which theorem, and what the layer makes of paths."""
    value = attention_bound(layer, ask, head_scale)
    if not ask.follows:
        return Bound(value, theorem(layer, ask.norm))
    q, m = effective_weights(layer, head_scale)
    gains = head_gains(layer, ask, q.device)
    keys, read = rounded_passage(q.flatten(0, 1)), read_out_passage(layer, m, gains)
    return Bound(value, theorem(layer, ask.norm), passage=lambda paths: read(behind(total(keys(paths)))))


def read_out_passage(layer: L2MultiheadAttention, m: Tensor, gains: Tensor) -> Passage:
    r"""Paths from :math:`[\Phi_h(Y_h) / G_h]_h`, which is no larger than Y, to the output.

    Args:
        layer: the attention.
        m: output matrices (H, d, D).
        gains: :math:`G_h`, (*, H).
    """
    error = _folding_error(layer) * gains.amax(-1)
    return rounded_passage((gains[..., None, None] * m).flatten(-3, -2).mT, error)


def rounded_passage(matrix: Tensor, error: Tensor | float = 0.0) -> Passage:
    """Through a matrix (*, m, n) whose entries were rounded a few times."""
    matrix = matrix.unsqueeze(-3)
    error = enlarge(error + 16.0 * UNIT * frobenius_norm(matrix).amax(-1))
    known = (norm_bound(matrix).amax(-1) + error) * ROUND_UP
    return partial(through, matrix=matrix, known=known, error=error)


def effective_weights(
    layer: L2MultiheadAttention, head_scale: Tensor | None = None, cast: bool = True
) -> tuple[Tensor, Tensor]:
    r""":math:`W_h` and :math:`s_h M_h` (H, d, D) of the function that runs, in float64.

    The layer multiplies by :math:`fl(\sqrt{2t} W)` and :math:`fl(s M / \sqrt{2t})`. Those very tensors,
    the root taken out again, which the gains do not see and the balance between heads does.

    Args:
        layer: the attention.
        head_scale: :math:`s_h` (H,), default 1.
        cast: as autocast casts them in its region.
    """
    root = layer.root()
    key, read = layer.key_weight(root), layer.read_out_weight(root, head_scale)
    if cast:
        key, read = running(key), running(read)
    if layer._balance is not None:
        root = layer.constants(layer._balance, root.device)[:, None, None]
    return _by_heads(layer, key.double()) / root, _by_heads(layer, read.double().mT) * root


def _by_heads(layer: L2MultiheadAttention, weight: Tensor) -> Tensor:
    """(H d, D) as (H, d, D)."""
    return rearrange(weight, "(h d) i -> h d i", h=layer.num_heads)


def _narrow(layer: L2MultiheadAttention) -> bool:
    """Whether it is in half precision, where a margin would cost more than a look at what runs."""
    return layer._stored().dtype in (torch.float16, torch.bfloat16)


def _folding_growth(layer: L2MultiheadAttention) -> float:
    """1 + r or its square: how the constant grows by folding roots and factors into rounded weights.

    The square for both weights, or 1 + r where the norm of the first is that of what runs.
    """
    grown = 1.0 + rounding_margin(layer._stored())[0]
    return grown if _narrow(layer) else grown**2


def _linf(
    layer: L2MultiheadAttention, q: Tensor, m: Tensor, spreads: Tensor, growth: float = 1.0
) -> Tensor:
    """The l_inf bound: the published one for the paper's form, its twin for the lean form."""
    if layer.v_proj is None:
        return linf_bound_lean(q, m, spreads, growth)
    v = _by_heads(layer, layer.v_proj.weight)
    return linf_bound_kim2021(q, v, layer.out_proj.weight, spreads, growth)


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


def _divided_by(layer: L2MultiheadAttention) -> Tensor:
    """The query-key weight (H d, D) whose norm Contractive divides by."""
    if _narrow(layer):
        return effective_weights(layer, cast=False)[0].flatten(0, 1)
    return layer.q_proj.weight


def head_matrices(layer: L2MultiheadAttention, norms: tuple[str, ...]) -> list[Tensor]:
    """The matrices that :func:`contractive_head_bounds` needs the spectral norms of, in these norms.

    The query-key weights of the heads (H, d, D) for "token", the same as one matrix (D, D) for "l2" and
    "self", and with either the output matrices as one.
    """
    q = _divided_by(layer)
    found = [_by_heads(layer, q)] if "token" in norms else []
    if "l2" in norms or "self" in norms:
        found.append(q)
    return [*found, layer.output_matrix().flatten(0, 1)] if found else []


@torch.no_grad()
def _lost(error: Tensor, bound: Tensor) -> Tensor:
    """error / bound, 0 where the bound is: weights of zero are not rounded."""
    return torch.where(bound > 0.0, error / bound, 0.0)


def contractive_head_bounds(
    layer: L2MultiheadAttention, asks: list[Ask], norms: list[Tensor]
) -> list[Divisor]:
    r"""What the heads are divided by to give the layer constant 1, for each of the questions.

    With factors s_h the layer has a constant of at most :math:`(1 + r) \max_h s_h b_h + \delta`, where
    :math:`\delta` comes from entries that rounding takes below the range of the dtype: in the l2 norm
    :math:`\delta = \|W\| \max_h G_h \max_h \sqrt{2 t_h}\, a` with r and a of
    :func:`~lipformer.layers.spectral.rounding_margin`. So each factor loses :math:`\delta / b_h`. It
    matters in float16 alone; the range of other dtypes begins at 1e-38.

    Args:
        layer: the attention.
        asks: the questions, one for each norm.
        norms: bounds of the norms of :func:`head_matrices`, and others behind them.
    """
    divisors = []
    growth = _folding_growth(layer)
    lossy = layer._stored().dtype == torch.float16
    least = rounding_margin(layer._stored())[1]
    matrices = len({"heads" if ask.norm == "token" else "q" for ask in asks if ask.norm != "linf"})
    for ask in asks:
        if ask.norm == "linf":
            _refuse_linf(layer, ask)
            q, m = _by_heads(layer, _divided_by(layer)), layer.output_matrix()
            spreads = layer.constants(head_spreads(layer, ask), q.device)
            bound = _linf(layer, q, m, spreads, growth).expand(layer.num_heads)
            lost = None
            if lossy:
                # Rows of D = H d entries, each off by least / D.
                rounded = layer.root().double().expand_as(q) * (least / layer.embed_dim)
                lost = _lost(linf_bound_lean(q, rounded, spreads), bound)
            divisors.append(Divisor(bound, lost))
            continue
        left = norms[0].square().sum().sqrt() if ask.norm == "token" else norms[matrices - 1]
        right = norms[matrices] if layer.v_proj is None else norms[matrices] + _folding_error(layer)
        # The factor covers the rounding of these products, and of a float64 product that formed m.
        heads = head_gains(layer, ask, left.device, (1.0 + 4e-12) * growth)
        lost = _lost(heads.amax() * layer.root().amax() * least, heads * right) if lossy else None
        divisors.append(Divisor(left * right * heads, lost))
    return divisors


@register_bound(L2MultiheadAttention)
def _(layer: L2MultiheadAttention, ask: Ask) -> Bound:
    layer.check_projections(ask.refuse)
    root = layer.root()
    if ask.readable(root) and not bool(((root > 0) & torch.isfinite(root)).all()):
        raise ask.refuse(
            f"its temperatures leave the range of {root.dtype}: {layer.log_temperature}",
            "log_temperature between -170 and 170",
        )
    return scaled_bound(layer, ask)


@register_bake(L2MultiheadAttention)
def bake_attention(
    layer: L2MultiheadAttention, head_scale: Tensor | None = None
) -> L2MultiheadAttention:
    """The layer in the lean form with plain weights: those that it runs with, factors among them.

    The temperatures are in the weights, which leaves 1/2. Its logarithm is kept in float64, where the
    root is 1 to the last bit in every dtype.
    """
    layer = copy.deepcopy(layer)
    root = layer.root()
    key = linear_of(layer.key_weight(root), layer.key_bias(root))
    out = linear_of(layer.read_out_weight(root, head_scale), layer.read_out_bias(head_scale))
    log_radius = layer.log_radius()
    if log_radius is not None:
        del layer.log_key_radius
        layer.register_buffer("log_key_radius", log_radius)
    if layer._balance is None:
        layer._balance = tuple(root.flatten().tolist())
    del layer.log_temperature
    layer.register_buffer(
        "log_temperature", torch.full_like(root.flatten(), 0.5, dtype=torch.float64).log()
    )
    layer.q_proj, layer.out_proj, layer.v_proj = key, out, None
    return layer.train(layer.training)


per_head.register(L2MultiheadAttention)(
    PerHead(
        matrices=head_matrices,
        divisors=contractive_head_bounds,
        forward=L2MultiheadAttention.scaled,
        bound=scaled_bound,
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
