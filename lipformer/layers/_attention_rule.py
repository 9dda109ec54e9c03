"""What certify and Contractive ask of L2MultiheadAttention: gains per head, and the whole bound."""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.functional import l2_gain, row_spread
from lipformer.layers._attention_bound import (
    joint_bound_minimum,
    linf_bound_kim2021,
    linf_bound_lean,
    token_bound_minimum,
)
from lipformer.layers._l2_multihead_attention import L2MultiheadAttention


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
        # Theorem C+ for any 0/1 mask with so many ones in a row or column.
        extra.append(l2_gain(n if layer.window is None else min(n, layer.window), theorem="C+"))
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
    if layer.any_mask:
        return "Theorem C+ (any mask)"
    if layer.slopes is not None:
        return "Theorems B++, C+ (ALiBi)"
    return {True: "Theorem B++", False: "Theorem A++", None: "Theorems A++, B++"}[layer.causal]


def attention_bound(layer: L2MultiheadAttention, ask: Ask, head_scale: Tensor | None = None) -> Tensor:
    """The bound of the layer, with each head's output times ``head_scale`` (H,), default 1."""
    if layer.training and layer.dropout > 0 and not ask.as_eval:
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


def head_matrix_names(norms: tuple[str, ...]) -> list[str]:
    """Which matrices :func:`contractive_head_bounds` needs the spectral norms of, in these norms."""
    left = ["heads"] * ("token" in norms) + ["q"] * bool({"l2", "self"}.intersection(norms))
    return [*left, "m"] if left else []


def head_matrices(layer: L2MultiheadAttention, norms: tuple[str, ...]) -> dict[str, Tensor]:
    """The matrices of :func:`head_matrix_names`.

    "heads": the query-key weights (H, d, D); "q": the same as one matrix (D, D); "m": the output
    matrices as one.
    """
    found: dict[str, Tensor] = {}
    for name in head_matrix_names(norms):
        if name == "m":
            found[name] = layer.output_matrix().flatten(0, 1)
        else:
            q = layer.q_proj.weight
            found[name] = q if name == "q" else rearrange(q, "(h d) i -> h d i", h=layer.num_heads)
    return found


def contractive_head_bounds(
    layer: L2MultiheadAttention, asks: list[Ask], norms: list[Tensor]
) -> list[Tensor]:
    """What the heads are divided by to give the layer constant 1: (H,) for each of the questions.

    Args:
        layer: the attention.
        asks: the questions, one for each norm.
        norms: bounds of the norms of :func:`head_matrices`.
    """
    known = dict(zip(head_matrix_names(tuple(ask.norm for ask in asks)), norms, strict=True))
    bounds = []
    for ask in asks:
        if ask.norm == "linf":
            q = rearrange(layer.q_proj.weight, "(h d) i -> h d i", h=layer.num_heads)
            spreads = layer.constants(head_spreads(layer, ask), q.device)
            bounds.append(_linf(layer, q, layer.output_matrix(), spreads).expand(layer.num_heads))
            continue
        left = known["heads"].square().sum().sqrt() if ask.norm == "token" else known["q"]
        right = known["m"] if layer.v_proj is None else known["m"] + _folding_error(layer)
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
