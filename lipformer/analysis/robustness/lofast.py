"""LoFAST: how far the output of dot-product attention can move when its tokens move by a finite way.

Its terms are in `lofast_terms`; everything is in float64 without gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lipformer.analysis.inputs import check_order, check_tokens, radii
from lipformer.analysis.maps import Attention, finite_maps
from lipformer.analysis.robustness.lofast_terms import (
    EXACT,
    covariance_term,
    gap_moves,
    jacobian_norm,
    logit_gaps,
    logit_norm,
    mixing_norm,
    remainder_term,
    row_caps,
    row_norms,
    softmax_slope,
    spreads,
)
from lipformer.functional.attention.maps import AttentionMaps
from lipformer.functional.rounding import UNIT, enlarge, round_up
from lipformer.functional.spectral.bound import norm_bound

Modulus = Callable[[Tensor], Tensor]
"""From a bound of the perturbation of each sample, (*,) in float64, to one of the output's."""

_TERMS = 1024
"""Of the sums and products of a dozen norms, each rounded up itself."""


@torch.no_grad()
def lofast_bound(
    attn: Attention,
    x: Tensor,
    eps: float | Tensor,
    *,
    residual: float = 0.0,
    scale: float = 1.0,
    refined: bool = True,
    mask: Tensor | None = None,
) -> Tensor:
    r"""Upper bound on :math:`\sup \|F(X') - F(X)\|_F` over :math:`\|X' - X\|_F \le \epsilon`.

    For :math:`F(X) = r X + s f(X)` with dot-product attention f of any number of heads. With
    :math:`X' = X + E` the difference is :math:`rE + s\sum_h P_h E W_h + s\sum_h (P_h' - P_h) X' W_h`, so

    .. math:: \|F(X') - F(X)\| \le \xi\epsilon + |s| \sum_h \tfrac12 R_h (\|X W_h\| + \epsilon \|W_h\|),
              \quad R_h = \epsilon (\|A_h X^\top\| + \|X A_h + 1 b_h\|) + \epsilon^2 \|A_h\|

    where :math:`\xi` is the norm of :math:`E \mapsto rE + s\sum_h P_h(X) E W_h` (see `mixing_norm`) and
    1/2 the constant of the softmax. This is the plain bound. The refined one uses that rows of weights
    sum to one and that softmax ignores constants, so that :math:`X W_h` and the change of the logits may
    be centred (:math:`C = I - 11^\top/N`):

    * :math:`\|C X W_h\|`, and :math:`\eta_h` for the sum in :math:`R_h` (see `logit_norm`);
    * for each row the mean slope of the softmax within its reach (see `softmax_slope`) and the largest
      way that weights can go at all (see `row_caps`), in place of 1/2;
    * averages of values stay in their convex hull, and for small eps move as covariances do (see
      `covariance_term`);
    * up to N D = 256 the Jacobian at X, whose norm is then known, and a remainder of order
      :math:`\epsilon^2` (see `jacobian_norm`, `remainder_term`), where that is smaller;
    * all heads together, :math:`(\sum_h \|P_h' - P_h\|^2)^{1/2} (\|[CXW_1; ..; CXW_H]\| + \epsilon
      \|[W_1; ..; W_H]\|)`, where that is smaller than the sum over heads;

    and is never larger than the plain one. Masks change none of the two proofs: the change of a row of
    weights is zero where masked and still sums to zero, and the allowed logits of a row are a part of
    all of them, so that their distance from any constant is at most that of all. What masks would allow
    in addition (a centring for each row over its own tokens) is not used.

    Source: Havens et al. 2024 (Fine-grained Local Sensitivity), for the split and xi; the refinements
    are derived here. Norms are certified from above and computed in float64, with margins for rounding.
    Grows with eps. Without gradients.

    Args:
        attn: whatever :func:`attention_maps` takes.
        x: X, (*, N, D).
        eps: radius, a number or (*,).
        residual: r; other than 0 only if f keeps the width D.
        scale: s.
        refined: the refined bound.
        mask: bool, True where token i may see token j, broadcastable to (*, 1, N, N).

    Returns:
        (*,), in x's dtype but at least float32, rounded up.

    Example:
        >>> maps = AttentionMaps(torch.eye(2)[None], torch.eye(2)[None])
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> lofast_bound(maps, x, 0.1, refined=False).item(), lofast_bound(maps, x, 0.1).item()
        (0.2155, 0.1849)
    """
    modulus = lofast_modulus(attn, x, residual=residual, scale=scale, refined=refined, mask=mask)
    radius = radii(eps, x.shape[:-2], x.device, "eps")
    return round_up(modulus(radius), torch.promote_types(x.dtype, torch.float32))


@torch.no_grad()
def lofast_modulus(
    attn: Attention,
    x: Tensor,
    *,
    residual: float = 0.0,
    scale: float = 1.0,
    refined: bool = True,
    mask: Tensor | None = None,
) -> Modulus:
    """:func:`lofast_bound` as a function of eps, (*,) to (*,) in float64, its norms computed once."""
    maps = finite_maps(attn)
    dim, out = maps.values.shape[1:]
    check_tokens(x, dim)
    check_order(attn, x)
    if residual and dim != out:
        raise ValueError(f"a residual needs attention that keeps the width {dim}, got width {out}")
    terms = _Terms(maps, x.detach().double(), residual, scale, mask)
    bound = terms.refined() if refined else terms.plain

    def modulus(eps: Tensor) -> Tensor:
        # Weights and tokens are finite, so that NaN is an overflow; and nothing moves within zero.
        return torch.where(eps == 0, 0.0, bound(eps).nan_to_num(nan=torch.inf, posinf=torch.inf))

    return modulus


def _smaller(a: Tensor, b: Tensor) -> Tensor:
    """The smaller bound; one that overflowed to NaN counts as infinite."""
    a, b = (bound.nan_to_num(nan=torch.inf, posinf=torch.inf) for bound in (a, b))
    return torch.minimum(a, b)


class _Terms:
    """What the bound needs of one input: norms (*, H) of each head and those of all heads together."""

    def __init__(
        self, maps: AttentionMaps, x: Tensor, residual: float, scale: float, mask: Tensor | None
    ) -> None:
        n, d = x.shape[-2:]
        self.x, self.maps, self.scale = x[..., None, :, :], maps, abs(scale)
        self.queries = maps.queries(x)
        scores = self.queries @ self.x.mT
        allowed = maps.allowed(x, mask)
        self.allowed = torch.ones_like(scores, dtype=torch.bool) if allowed is None else allowed
        self.scores = scores.masked_fill(~self.allowed, -torch.inf)
        self.weights = self.scores.softmax(-1)
        # Rounding: entries of products of n-term sums are off by k u times products of norms.
        k = 8.0 * (n + d + 8) * UNIT
        size = torch.linalg.matrix_norm(self.x)
        longest = torch.linalg.vector_norm(self.x, dim=-1).amax(-1)
        shift = x.new_zeros(()) if maps.offset is None else maps.offset.norm(dim=-1)
        logits = torch.linalg.matrix_norm(maps.logits)
        self.logit_error = k * (longest * logits + shift) * longest
        self.query_error = k * (size * logits + math.sqrt(n) * shift)
        self.value_error = k * size * torch.linalg.matrix_norm(maps.values)
        self.slack = k + 4.0 * self.logit_error.amax(-1)
        self.query_norm = norm_bound(self.queries) + self.query_error
        self.logit_norm = norm_bound(maps.logits)
        self.value_norm = norm_bound(maps.values)
        # Heads may cancel: errors count by the sizes of the terms, not by that of their sum.
        terms = abs(residual) + abs(scale) * math.sqrt(n) * torch.linalg.matrix_norm(maps.values).sum()
        self.mixing = mixing_norm(self.weights, maps.values, residual, scale) + self.slack * terms
        self.residual, self.signed_scale, self.term_error = residual, scale, self.slack * terms
        self.plain_keys = norm_bound(self.x @ maps.logits.mT) + self.query_error
        self.plain_values = norm_bound(self.x @ maps.values) + self.value_error

    def plain(self, eps: Tensor) -> Tensor:
        """xi eps + |s| sum_h R_h / 2 (||X W_h|| + eps ||W_h||)."""
        e = eps[..., None]
        reach = e * (self.plain_keys + self.query_norm) + e.square() * self.logit_norm
        moved = (0.5 * reach * (self.plain_values + e * self.value_norm)).sum(-1)
        return enlarge(self.mixing * eps + self.scale * moved, _TERMS)

    def refined(self) -> Modulus:
        """The refined bound as a function of eps."""
        maps, values = self.maps, self.maps.values
        centred = self.x - self.x.mean(-2, keepdim=True)
        keys, mixed = centred @ maps.logits.mT, centred @ values
        key_norm = norm_bound(keys) + self.query_error
        reach_norm = key_norm + self.query_norm
        joint_norm = logit_norm(keys, self.queries) + self.query_error.sum(-1)
        if keys.shape[-1] * keys.shape[-2] <= EXACT:
            # One head at a time: the matrices of all would be large together.
            pairs = zip(keys.split(1, -3), self.queries.split(1, -3), strict=True)
            exact = torch.stack([logit_norm(z, u) for z, u in pairs], -1)
            reach_norm = torch.minimum(reach_norm, exact + self.query_error)
        row_norm = row_norms(keys, self.queries, key_norm) + self.query_error[..., None]
        logit_stack = norm_bound(maps.logits.transpose(0, 1).flatten(1))
        weight_stack = norm_bound(values.flatten(0, 1))
        value_norm = norm_bound(mixed) + self.value_error
        value_stack = norm_bound(mixed.flatten(-3, -2)) + self.value_error.sum(-1)
        doubt = 2.0 * self.logit_error[..., None]
        gaps = logit_gaps(self.scores)
        nearest, largest = (gaps.abs().amin(-1) - doubt).clamp_min(0.0), gaps.amax(-1) + doubt
        gaps = gaps + doubt[..., None]
        caps = row_caps(self.weights, self.allowed) + self.slack[..., None, None]
        key_spread = spreads(keys, self.weights, self.allowed) + self.query_error[..., None, None]
        value_spread = spreads(mixed, self.weights, self.allowed) + self.value_error[..., None, None]
        # An average of allowed values stays in their convex hull.
        hull = value_spread.amax(-1)
        lengths = torch.linalg.vector_norm(self.queries, dim=-1) + self.query_error[..., None]
        distances = torch.cdist(keys, keys, compute_mode="donot_use_mm_for_euclid_dist")
        key_diameter = distances.amax(-1) + 2.0 * self.query_error[..., None]
        jacobian = self._jacobian(keys, mixed)

        def modulus(eps: Tensor) -> Tensor:
            e = eps[..., None]
            bent = e * self.logit_norm
            reach = e * (reach_norm + bent)
            row = torch.minimum(e[..., None] * (row_norm + bent[..., None]), reach[..., None])
            length = lengths + bent[..., None]
            moves = e[..., None, None] * gap_moves(key_diameter, length)
            moves = enlarge(torch.minimum(moves, (math.sqrt(2.0) * row)[..., None]), _TERMS)
            slope = softmax_slope(nearest, largest, moves.amax(-1))
            steepest = slope.amax(-1)
            by_rows = torch.linalg.vector_norm(torch.minimum(slope * row, caps), dim=-1)
            each = torch.minimum(steepest * reach, by_rows)
            joint = steepest.amax(-1) * eps * (joint_norm + eps * logit_stack)
            joint = torch.minimum(joint, torch.linalg.vector_norm(each, dim=-1))
            # (P' - P) X W, in four ways, then (P' - P) E W.
            in_hull = torch.minimum(slope * row * value_norm[..., None], hull)
            apart = torch.minimum(each * value_norm, torch.linalg.vector_norm(in_hull, dim=-1)).sum(-1)
            high = torch.sigmoid(gaps + moves)
            local = covariance_term(eps, high, key_spread, value_spread, length)
            moved = torch.minimum(torch.minimum(apart, local), joint * value_stack)
            moved = moved + eps * torch.minimum((each * self.value_norm).sum(-1), joint * weight_stack)
            total = enlarge(self.mixing * eps + self.scale * moved, _TERMS)
            if jacobian is not None:
                # The second way: no term of order one but the Jacobian itself.
                left = remainder_term(
                    eps,
                    self.weights + self.slack[..., None, None, None],
                    high,
                    key_spread,
                    value_spread,
                    length,
                    hull + in_hull,
                    self.logit_norm,
                    self.value_norm,
                )
                total = _smaller(total, enlarge(jacobian * eps + self.scale * left, _TERMS))
            return _smaller(total, self.plain(eps))

        return modulus

    def _jacobian(self, keys: Tensor, mixed: Tensor) -> Tensor | None:
        """Upper bound on the Jacobian's norm, (*,), or None where its matrix would be large."""
        values = self.maps.values
        n, (d, e) = keys.shape[-2], values.shape[1:]
        if max(n * d, n * e) > EXACT:
            return None
        norm = jacobian_norm(
            self.weights, keys, self.queries, mixed, values, self.residual, self.signed_scale
        )
        # Rounding of the covariances: weights are off by `slack`, keys, queries and values as above.
        lengths = torch.linalg.matrix_norm(keys) + torch.linalg.matrix_norm(self.queries)
        sizes = torch.linalg.matrix_norm(mixed)
        error = self.slack[..., None] * lengths * sizes + self.query_error * sizes
        error = error + lengths * self.value_error
        return norm + self.term_error + self.scale * 4.0 * math.sqrt(n) * error.sum(-1)
