r"""Theorem L: how far a head of L2 attention can move around an input (docs/theory, section 8).

The head is :math:`\Phi(Z) = P(Z) Z` with logits :math:`b_{ij} - \|z_i - z_j\|^2`, b any fixed bias, and
tokens may move by :math:`\|Z' - Z\|_F \le \eta`. Shapes: tokens (*, N, d), weights (*, N, N), one number
for each head (*,); float64, without gradients.

Rounding: the bounds are those of the tokens as stored, exactly. Their computed weights are exact ones of
logits that are off by at most e, as if the bias were off by that (`Terms.doubt`), and a row is seen from
a point g that is stored too and `drift` away from its mean. What remains are sums and products of
positive numbers, whose relative errors the factors at the ends cover.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lipformer.analysis.robustness.lofast_terms import logit_gaps
from lipformer.functional import spectral_norm_bound
from lipformer.functional.rounding import UNIT
from lipformer.functional.spectral.bound import norm_bound

DENSE = 1100
"""Up to this N d the Jacobian at Z is made as a whole."""

_CLOSE = 1.02
"""Bounds of the Jacobian's norm up to this are close enough: it is at least 1."""

_NODES = 8
"""Steps of the integral of H."""

_CHUNK = 2**22
"""Numbers of (*, N, N, d) at a time."""

_SHARES = (0.9, 1.0, 1.15, 1.3)
"""c of `_grown`, of the mean of W / w."""

_OWN_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.5, 4.0, 8.0)
"""omega of `jacobian_bound`."""


class Terms(NamedTuple):
    r"""What the bounds need of the tokens of a head, (*, N, N) unless said otherwise.

    Attributes:
        z: tokens, (*, N, d).
        allowed: where a token sees another.
        weights: P, 0 where masked.
        gaps: logit of P, -inf where masked.
        doubt: how far the logit of a weight may be off, e.
        lost: how far a weight may be off what its stored logits give.
        distances: :math:`|z_i - z_j|`, 0 where masked.
        diameter: the largest distance of two tokens, masked or not, (*,).
        spreads: :math:`|z_j - g_i|`, 0 where masked.
        centres: g, (*, N, d).
        drift: how far g may be off the mean under P, (*, N).
        steepness: A of `weight_caps`.
        curvatures: q of `weight_caps`, (*, N).
        rows: :math:`\|\sum_j P_{ij} (z_j - g_i)(z_j - g_i)^\top\|`, (*, N).
        thirds: the same with :math:`P_{ij} |z_j - g_i|^2`, (*, N).
        columns: :math:`\|\sum_i P_{ij} (z_i - z_j)(z_i - z_j)^\top\|`, (*, N).
        unit: relative rounding of a sum of N d terms.
    """

    z: Tensor
    allowed: Tensor
    weights: Tensor
    gaps: Tensor
    doubt: Tensor
    lost: Tensor
    distances: Tensor
    diameter: Tensor
    spreads: Tensor
    centres: Tensor
    drift: Tensor
    steepness: Tensor
    curvatures: Tensor
    rows: Tensor
    thirds: Tensor
    columns: Tensor
    unit: float


def _distances(a: Tensor, b: Tensor) -> Tensor:
    # Not through products, whose cancellation costs half of the digits.
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


def _off_diagonal(a: Tensor) -> Tensor:
    return a.masked_fill(torch.eye(a.shape[-1], dtype=torch.bool, device=a.device), 0.0)


def _moments(weights: Tensor, points: Tensor, centres: Tensor) -> Tensor:
    r""":math:`\|\sum_j w_{ij} (y_j - c_i)(y_j - c_i)^\top\|`, (*, N, N), (*, N, d) twice -> (*, N)."""
    n, d = points.shape[-2:]
    count = max(1, _CHUNK // (n * n * d))
    heads = (t.flatten(0, -3).split(count) for t in (weights, points, centres))
    norms = [
        norm_bound(w.sqrt()[..., None] * (y[:, None] - c[:, :, None])).square()
        for w, y, c in zip(*heads, strict=True)
    ]
    return torch.cat(norms).unflatten(0, weights.shape[:-2])


def head_terms(z: Tensor, bias: Tensor | None = None) -> Terms:
    """The terms of tokens (*, N, d) in float64, at least one leading dimension.

    Args:
        z: tokens times the root of the temperature.
        bias: b, broadcastable to (*, N, N), 0 on the diagonal and at most 0 beside it, -inf where
            masked; a row that is masked wholly, that of a padded token, is zero.
    """
    n, d = z.shape[-2:]
    unit = 8.0 * (n + d + 8) * UNIT
    tiny = torch.finfo(z.dtype).tiny
    distances = _off_diagonal(_distances(z, z) + math.sqrt(tiny))
    diameter, squares = distances.amax((-2, -1)), distances.square()
    bias = torch.zeros_like(squares) if bias is None else bias.to(z.dtype).expand_as(squares)
    allowed = bias > -torch.inf
    scores = bias - squares
    # A row that sees nothing is zero; its scores would give NaN.
    nothing = ~allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(nothing, 0.0)
    logs, gaps = scores.log_softmax(-1), logit_gaps(scores)

    def known(a: Tensor) -> Tensor:
        return a.masked_fill(~allowed, 0.0)

    logs, weights = known(logs), known(logs.exp())
    gaps = gaps.masked_fill(~allowed, -torch.inf)
    distances, squares = known(distances), known(squares)
    error = known(unit * (squares + known(bias).abs() + logs.abs() + 1.0))
    # The mean error of the other logits of a row; for its largest weight without that weight.
    best = scores.argmax(-1, keepdim=True)
    others = known(scores.scatter(-1, best, -torch.inf).softmax(-1).nan_to_num(nan=0.0))
    among = (others * error.expm1()).sum(-1, keepdim=True)
    mean = (weights * error.expm1()).sum(-1, keepdim=True) / torch.sigmoid(-gaps).clamp_min(0.25)
    doubt = known(error + mean.scatter(-1, best, among) + unit * (1.0 + known(gaps).abs()))
    doubt = doubt.masked_fill(gaps.isposinf(), 0.0)
    lost = unit * weights * (1.0 - logs)
    centres = weights @ z
    lengths = torch.linalg.vector_norm(z, dim=-1)
    drift = ((lost + unit * weights) @ lengths[..., None])[..., 0]
    spreads = known(_distances(centres, z))
    own = (weights.square() * squares).sum(-1, keepdim=True)
    others = (own * (1.0 + unit) - weights.square() * squares).clamp_min(0.0)
    rest = torch.sigmoid(-gaps)
    steepness = ((spreads + drift[..., None]).square() + rest.square() * squares + others).sqrt()
    away = _off_diagonal(weights)
    return Terms(
        z=z,
        allowed=allowed,
        weights=weights,
        gaps=gaps,
        doubt=doubt,
        lost=lost,
        distances=distances,
        diameter=diameter,
        spreads=spreads,
        centres=centres,
        drift=drift,
        steepness=steepness,
        curvatures=away.sum(-1) + away.amax(-1),
        rows=_moments(weights, z, centres),
        thirds=_moments(weights * spreads.square(), z, centres),
        columns=_moments(weights.mT, z, z),
        unit=unit,
    )


def weight_caps(terms: Terms, eta: Tensor) -> Tensor:
    r"""Upper bounds :math:`\bar P` of the weights at every Z' within eta, (*, N, N).

    .. math:: \mathrm{logit}\,\bar P_{ij} = \mathrm{logit}\,P_{ij} +
              \frac{2 \eta A_{ij} + \eta^2 q_i}{1 - P_{ij}} + e_{ij}, \quad
              A_{ij}^2 = |z_j - g_i|^2 + (1 - P_{ij})^2 t_{ij} + \sum_{k \ne j} P_{ik}^2 t_{ik}, \quad
              q_i = \sum_{k \ne i} P_{ik} + \max_{k \ne i} P_{ik}

    with :math:`t_{ij} = |z_i - z_j|^2` and e for rounding. From logits: weights that round to 0 or 1 may
    move.

    Args:
        terms: of the tokens.
        eta: (*,).
    """
    eta = eta[..., None, None]
    moved = 2.0 * eta * terms.steepness + eta.square() * terms.curvatures[..., None]
    moved = moved / torch.sigmoid(-terms.gaps).clamp_min(torch.finfo(moved.dtype).tiny)
    logits = terms.gaps + (moved * (1.0 + 128.0 * terms.unit) + terms.doubt)
    return _at_logits(terms, logits) * (1.0 + terms.unit)


def _at_logits(terms: Terms, logits: Tensor) -> Tensor:
    """Weights of logits, (*, N, N); never 0 but where masked."""
    weights = torch.sigmoid(logits).clamp_min(torch.finfo(logits.dtype).tiny)
    return weights.masked_fill(~terms.allowed, 0.0)


def _grown(norm: Tensor, low: Tensor, high: Tensor, squares: Tensor, dim: int) -> Tensor:
    r"""Upper bound on :math:`\|\sum_j W_j y_j y_j^\top\|` from that with weights w, without a norm anew.

    .. math:: \min_{c \ge 1} c \Bigl\|\sum_j w_j y_j y_j^\top\Bigr\| + \sum_j (W_j - c w_j)_+ |y_j|^2

    over some c, since :math:`W_j \le c w_j + (W_j - c w_j)_+`.

    Args:
        norm: with weights w, (*, N).
        low: w, (*, N, N).
        high: W, (*, N, N).
        squares: :math:`|y_j|^2`, (*, N, N).
        dim: that of j.
    """
    tiny = torch.finfo(norm.dtype).tiny
    mean = (high * squares).sum(dim) / (low * squares).sum(dim).clamp_min(tiny)
    best = norm + ((high - low).clamp_min(0.0) * squares).sum(dim)
    for share in _SHARES:
        c = (share * mean).clamp_min(1.0)
        rest = (high - c.unsqueeze(dim) * low).clamp_min(0.0)
        best = torch.minimum(best, c * norm + (rest * squares).sum(dim))
    return best


def curvature(terms: Terms, eta: Tensor) -> Tensor:
    r"""H: upper bound on the norm of the second derivative at every Z' within eta, (*,).

    With :math:`\bar P` of `weight_caps`, :math:`p_i = \max_j \bar P_{ij}` and
    :math:`\bar t = (\sqrt t + \sqrt2 \eta)^2` off the diagonal and 0 on it,

    .. math:: \lambda_i = \bigl( \|\textstyle\sum_j \bar P_{ij} \Delta_{ij} \Delta_{ij}^\top\|^{1/2} +
              \eta \sqrt{p_i} \bigr)^2, \quad \Delta_{ij} = z_j - g_i, \qquad
              \sigma_i^2 = \lambda_i + \max_j \bar P_{ij} \bar t_{ij},

    .. math:: \kappa_j = \bigl( \|\textstyle\sum_i \bar P_{ij} \delta_{ij} \delta_{ij}^\top\|^{1/2} +
              \eta (\textstyle\sum_{i \ne j} \bar P_{ij} + \max_{i \ne j} \bar P_{ij})^{1/2}
              \bigr)^2, \quad \delta_{ij} = z_i - z_j, \qquad
              s = 2 \max_i \sqrt{\lambda_i} + 2 \max_j \sqrt{\kappa_j},

    it is

    .. math:: H = 2 \min\bigl\{ 2 (\max_j \textstyle\sum_i \bar P_{ij} \sigma_i^2)^{1/2},
              \max_i \sqrt{p_i}\, s \bigr\} + 4 \max_i \sqrt{\lambda_i p_i} +
              2 (\max_j \textstyle\sum_i \lambda_i \bar P_{ij})^{1/2} +
              2 s \max_i \min\{\rho_i \sigma_i, \chi_i\}

    where :math:`\rho_i` bounds :math:`|z'_j - g'_i|` and :math:`2 \chi_i` the root of
    :math:`E[\beta^2 (l - E l)^2]` (see `_thirds`). The norms with :math:`\bar P` come from those with P
    (see `_grown`).

    Args:
        terms: of the tokens.
        eta: (*,).
    """
    caps, e = weight_caps(terms, eta), eta[..., None]
    near, far = terms.spreads.square(), terms.distances.square()
    top = caps.amax(-1)
    farthest = terms.spreads.amax(-1)
    moved = e * top.sqrt()
    spread = torch.minimum(_grown(terms.rows, terms.weights, caps, near, -1).sqrt(), farthest)
    variances = (spread + moved).square()
    grown = (caps - terms.weights + terms.lost).clamp_min(0.0)
    shift = (grown * terms.spreads).sum(-1) + grown.sum(-1).clamp_max(1.0) * farthest + terms.drift
    shift = torch.minimum(shift, spread) + moved
    squares = _off_diagonal(terms.distances + math.sqrt(2.0) * e[..., None]).square()
    squares = squares.masked_fill(~terms.allowed, 0.0)
    slopes = variances + (caps * squares).amax(-1)
    away = _off_diagonal(caps)
    column = _grown(terms.columns, terms.weights, caps, far, -2).sqrt()
    column = column + e * (away.sum(-2) + away.amax(-2)).sqrt()
    together = 2.0 * (variances.amax(-1).sqrt() + column.amax(-1))
    reach = torch.minimum(farthest + e + shift, terms.diameter[..., None] + math.sqrt(2.0) * e)
    thirds = _thirds(terms, caps, squares, variances, shift, reach, e)
    values = 2.0 * (caps.mT @ slopes[..., None])[..., 0].amax(-1).sqrt()
    values = torch.minimum(values, top.amax(-1).sqrt() * together)
    logits = 4.0 * (variances * top).amax(-1).sqrt()
    logits = logits + 2.0 * (caps.mT @ variances[..., None])[..., 0].amax(-1).sqrt()
    cubes = 2.0 * together * torch.minimum(reach * slopes.sqrt(), thirds).amax(-1)
    return (2.0 * values + logits + cubes) * (1.0 + 64.0 * terms.unit)


def _thirds(
    terms: Terms,
    caps: Tensor,
    squares: Tensor,
    variances: Tensor,
    shift: Tensor,
    reach: Tensor,
    e: Tensor,
) -> Tensor:
    r"""chi: upper bound on :math:`\frac12 E[\beta^2 (l - E l)^2]^{1/2}` in each row, (*, N).

    For :math:`\beta_j = a \cdot (z'_j - g'_i)` of a unit vector a and the derivative l of the logits
    along a unit E, with weights :math:`w_{ij} = \bar P_{ij} \rho_{ij}^2` and :math:`\rho_{ij}` above
    :math:`|z'_j - g'_i|`,

    .. math:: \chi_i = \bigl( f_i^2 + \max_j w_{ij} \bar t_{ij} \bigr)^{1/2} +
              \bigl( \lambda_i \textstyle\sum_j \bar P_{ij}^2 \bar t_{ij} \bigr)^{1/2}

    .. math:: f_i = \|\textstyle\sum_j w_{ij} \Delta_{ij} \Delta_{ij}^\top\|^{1/2} +
              \eta \max_j \sqrt{w_{ij}} + |g'_i - g_i| (\textstyle\sum_j w_{ij})^{1/2}.
    """
    lengths = torch.minimum(terms.spreads + (e + shift)[..., None], reach[..., None])
    high = caps * lengths.square()
    near = terms.spreads.square()
    own = _grown(terms.thirds, terms.weights * near, high, near, -1).sqrt()
    own = own + e * high.amax(-1).sqrt() + shift * high.sum(-1).sqrt()
    mean = (variances * (caps.square() * squares).sum(-1)).sqrt()
    return (own.square() + (high * squares).amax(-1)).sqrt() + mean


def jacobian_bound(terms: Terms) -> Tensor:
    r""":math:`L_0`: upper bound on the norm of the Jacobian at Z, (*,).

    The smallest of that of its whole matrix, within 0.8%, of blocks
    :math:`P_{ij} (I + 2 (z_j - g_i)(z_i - z_j)^\top)` and :math:`2 C_i` more on the diagonal, and of

    .. math:: \|P\| + 2 \max_i \lambda_i + 2 \bigl( \max_j \textstyle\sum_i \lambda_i P_{ij} t_{ij}
              \bigr)^{1/2} \quad\text{and}\quad \min_\omega \max_j \bigl( \textstyle\sum_i
              \Theta_i P_{ij} + \omega \Theta_j \bigr)^{1/2},

    :math:`\lambda_i = \|C_i\|` and :math:`\Theta_i = 1 + 4 \|\sum_j P_{ij} (t_{ij} - 1)_+ (z_j - g_i)
    (z_j - g_i)^\top\| + 4 \lambda_i^2 / \omega`. The matrix is made up to N d = 1100, and where the
    others are above 1.02: the norm is at least 1, since moving all tokens alike moves all outputs so.
    """
    high = _at_logits(terms, terms.gaps + terms.doubt) * (1.0 + terms.unit)
    low = _at_logits(terms, terms.gaps - terms.doubt) * (1.0 - terms.unit)
    off = high - low + terms.lost  # of every weight from the computed one
    drift = terms.drift + (off * terms.spreads).sum(-1)
    squares = terms.distances.square()
    variances = terms.rows + (off * terms.spreads.square()).sum(-1)
    total = norm_bound(terms.weights) + torch.linalg.matrix_norm(off) + 2.0 * variances.amax(-1)
    pulled = (high * variances[..., None] * squares).sum(-2).amax(-1)
    best = total + 2.0 * pulled.sqrt()
    excess = (squares - 1.0).clamp_min(0.0)
    skewed = _moments(terms.weights * excess, terms.z, terms.centres)
    skewed = (skewed + (off * excess * terms.spreads.square()).sum(-1)).sqrt()
    skewed = (skewed + drift * (high * excess).sum(-1).sqrt()).square()
    for omega in _OWN_SHARES:
        theta = 1.0 + 4.0 * skewed + (4.0 / omega) * variances.square()
        square = (high.mT @ theta[..., None])[..., 0] + omega * theta
        best = torch.minimum(best, square.amax(-1).sqrt())
    best = best * (1.0 + 8.0 * terms.unit)
    n, d = terms.z.shape[-2:]
    far = ~(best <= _CLOSE)
    if n * d > DENSE or not bool(far.any()):
        return best
    each = math.sqrt(d) + 2.0 * terms.spreads * terms.distances
    blocks = (off + terms.unit * high) * each + 2.0 * high * drift[..., None] * terms.distances
    own = ((off + terms.unit * high) * terms.spreads.square()).sum(-1) + drift.square()
    error = (torch.linalg.matrix_norm(blocks) + 2.0 * own.amax(-1)) * (1.0 + 8.0 * terms.unit)
    dense = _dense_norms(terms.z[far], terms.weights[far], terms.centres[far]) + error[far]
    return best.masked_scatter(far, torch.fmin(best[far], dense))


def _dense_norms(*parts: Tensor) -> Tensor:
    """Norms (K,) of the matrices (N d, N d) of blocks of z (K, N, d), P (K, N, N) and g (K, N, d)."""
    n, d = parts[0].shape[-2:]
    norms = []
    for z, p, g in zip(*(t.split(max(1, _CHUNK // (n * d) ** 2)) for t in parts), strict=True):
        spread = p[..., None] * (z[:, None] - g[:, :, None])
        whole = 2.0 * torch.einsum("hije,hijd->hiejd", spread, z[:, :, None] - z[:, None])
        # A view: element (.., e, i, j) is entry (i, e, j, e).
        whole.diagonal(dim1=-3, dim2=-1).add_(p[..., None])
        own = torch.einsum("hije,hijd->hied", spread, z[:, None] - g[:, :, None])
        whole.diagonal(dim1=-4, dim2=-2).add_(2.0 * own.movedim(1, -1))
        norms.append(spectral_norm_bound(whole.flatten(-2).flatten(-3, -2)))
    return torch.cat(norms)


def local_gain(
    terms: Terms,
    slope: Tensor,
    eta: Tensor,
    gain: Tensor | float = math.inf,
    error: Tensor | float = 0.0,
) -> Tensor:
    r"""Upper bound on :math:`\|\Phi(Z') - \Phi(Z)\| / \|Z' - Z\|` for all steps of at most eta, (*,).

    At a distance r of the tokens as stored the Jacobian has norm at most
    :math:`L(r) = \min(G, L_0 + \int_0^r H)`, so that the mean of L(error + s) over s in [0, eta] is such
    a bound. With K steps of :math:`h = \eta / K` and :math:`H_k = H(\mathrm{error} + k h)`, which holds
    in the whole ball, it is at most

    .. math:: \frac1K \sum_{k=1}^K \min\Bigl(G, L_0 + \mathrm{error}\, H_1 + h \sum_{m<k} H_m +
              \frac h2 H_k\Bigr),

    the middle of a step being above the mean over it, since a minimum of G and a linear function is
    concave. The bounds of L grow along the steps, so that a shorter step has a smaller mean.

    Args:
        terms: of the tokens.
        slope: :math:`L_0` of `jacobian_bound`, (*,).
        eta: (*,).
        gain: G, the global gain, (*,).
        error: how far the tokens may be off those that are meant, (*,).
    """
    step = eta / _NODES
    total, mean = slope, torch.zeros_like(slope)
    gain = torch.as_tensor(gain, dtype=slope.dtype, device=slope.device)
    for k in range(1, _NODES + 1):
        bent = curvature(terms, error + k * step)
        if k == 1:
            total = total + error * bent
        # What overflowed says nothing.
        middle = (total + 0.5 * step * bent).nan_to_num(nan=torch.inf, posinf=torch.inf)
        mean = mean + torch.minimum(middle, gain)
        total = total + step * bent
    return torch.minimum(mean / _NODES * (1.0 + 64.0 * UNIT), gain)
