"""The terms of LoFAST's bound, each as one formula with an upper bound that is proven.

Shapes: tokens (*, N, D), weights of attention (*, H, N, N); everything in float64 without gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipformer.functional.rounding import UNIT, enlarge
from lipformer.functional.spectral.bound import norm_bound

EXACT = 256
"""Up to this N D a norm of a map between token matrices is taken of the whole (N D, N D) matrix."""


def mixing_norm(weights: Tensor, values: Tensor, residual: float, scale: float) -> Tensor:
    r"""Upper bound on the norm of :math:`E \mapsto r E + s \sum_h P_h E W_h`, LoFAST's xi.

    With any matrix :math:`\bar P` in the place of zero (here the mean of the heads, and zero), and
    :math:`\Delta_h = P_h - \bar P`,

    .. math:: \xi \le |r| + |s| \Bigl( \|\bar P\| \bigl\|\textstyle\sum_h W_h\bigr\| +
              \min\bigl\{ \|\textstyle\sum \Delta_h \Delta_h^\top\| \|\sum W_h W_h^\top\|,\;
              \|\sum \Delta_h^\top \Delta_h\| \|\sum W_h^\top W_h\| \bigr\}^{1/2} \Bigr)

    The pairs are these and no others: with :math:`W_h^\top W_h` beside :math:`\Delta_h \Delta_h^\top`
    the inequality is false. In vectors, :math:`\sum \Delta_h \otimes W_h^\top` is a row of blocks
    :math:`\Delta_h \otimes I` times a column of blocks :math:`I \otimes W_h^\top` (or the reverse),
    whose norms are the two roots. Up to N D = 256 the norm of the whole Kronecker matrix is taken.

    Args:
        weights: P, (*, H, N, N).
        values: W, (H, D, E); E = D unless residual is 0.
        residual: r.
        scale: s.

    Returns:
        (*,).
    """
    n, d, e = weights.shape[-1], *values.shape[1:]
    if max(n * d, n * e) <= EXACT:
        whole = scale * torch.einsum("...hij,hde->...iejd", weights, values).flatten(-2).flatten(-3, -2)
        if residual:
            whole = whole + residual * torch.eye(n * d, dtype=whole.dtype, device=whole.device)
        return norm_bound(whole)
    pairs = (
        norm_bound(values.transpose(0, 1).flatten(1)),
        norm_bound(values.flatten(0, 1)),
    )
    mean = weights.mean(-3)
    common = norm_bound(mean) * norm_bound(values.sum(0))
    gain = torch.minimum(
        _shared_norm(weights, *pairs), common + _shared_norm(weights - mean[..., None, :, :], *pairs)
    )
    return abs(residual) + abs(scale) * gain


def _shared_norm(factors: Tensor, wide: Tensor, high: Tensor) -> Tensor:
    """The root of the minimum above: ||[D_1 .. D_H]|| ||[W_1 .. W_H]||, or both stacked."""
    beside = norm_bound(factors.transpose(-3, -2).flatten(-2))
    above = norm_bound(factors.flatten(-3, -2))
    return torch.minimum(beside * wide, above * high)


def logit_norm(keys: Tensor, queries: Tensor) -> Tensor:
    r"""Upper bound on the norm of :math:`E \mapsto (E Z_h^\top + U_h E^\top C)_h`, LoFAST's eta.

    This is how logits, centred in each row, move with the tokens: :math:`Z_h = C X A_h^\top`,
    :math:`U_h = X A_h + 1 b_h`, :math:`C = I - 11^\top/N`. At most
    :math:`\|[Z_1; ..; Z_H]\| + \|[U_1; ..; U_H]\|`. Up to N D = 256 it is the root of the norm of the
    matrix of

    .. math:: E \mapsto \sum_h E Z_h^\top Z_h + U_h E^\top Z_h + Z_h E^\top U_h + C E U_h^\top U_h.

    Args:
        keys: Z, (*, H, N, D).
        queries: U, (*, H, N, D).

    Returns:
        (*,), for the heads together; for one head alone give H = 1.
    """
    n, d = keys.shape[-2:]
    z, u = keys.flatten(-3, -2), queries.flatten(-3, -2)
    apart = norm_bound(z) + norm_bound(u)
    if n * d > EXACT:
        return apart
    eye = torch.eye(n, dtype=z.dtype, device=z.device)
    square = torch.einsum("kl,...de->...kdle", eye, z.mT @ z)
    square += torch.einsum("kl,...de->...kdle", eye - 1.0 / n, u.mT @ u)
    cross = torch.einsum("...hke,...hld->...kdle", queries, keys).flatten(-2).flatten(-3, -2)
    whole = norm_bound(square.flatten(-2).flatten(-3, -2) + cross + cross.mT)
    # The entries of the square are rounded sums of products.
    length = 8.0 * (z.shape[-2] + d + 8)
    error = length * UNIT * (z.square().sum((-2, -1)) + u.square().sum((-2, -1)))
    return torch.minimum(apart, (whole + error).sqrt())


def row_norms(keys: Tensor, queries: Tensor, key_norm: Tensor) -> Tensor:
    r"""Upper bounds on the norms of :math:`E \mapsto e_i Z^\top + u_i E^\top C`, row i of the logits.

    The adjoint maps y to the sum of :math:`yZ` in row i and of :math:`(Cy) \otimes u_i`, of squared norm
    at most :math:`\|Z\|^2 + \|u_i\|^2 + 2\max_{\|y\|=1} y_i\, y \cdot Z u_i`, and the last maximum, of a
    form of rank two, is :math:`(Z u_i)_i + \|Z u_i\|`. At most :math:`\|Z\| + \|u_i\|` in any case.

    Args:
        keys: Z, (*, N, D).
        queries: U, (*, N, D).
        key_norm: upper bound on ||Z||, (*,).

    Returns:
        (*, N).
    """
    key_norm = key_norm[..., None]
    length = torch.linalg.vector_norm(queries, dim=-1)
    moved = queries @ keys.mT
    own = moved.diagonal(dim1=-2, dim2=-1)
    square = key_norm.square() + length.square() + own + torch.linalg.vector_norm(moved, dim=-1)
    return torch.minimum(key_norm + length, square.clamp_min(0.0).sqrt())


def logit_gaps(scores: Tensor) -> Tensor:
    r""":math:`z_j = \mathrm{logit}(p_j) = s_j - \log \sum_{k \ne j} e^{s_k}`, p the softmax of a row.

    From the scores: weights that round to 0 or 1 would give infinite ones, and a bound that forgets that
    they may move. Where a row has one entry, z is infinite rightly.

    Args:
        scores: (*, N), -inf where masked.

    Returns:
        (*, N), -inf where masked.
    """
    top, best = scores.max(-1, keepdim=True)
    others = scores.scatter(-1, best, -torch.inf).logsumexp(-1, keepdim=True)
    log_weights = scores.log_softmax(-1)
    # All but the best weigh at most 1/2, where this is exact to rounding.
    gaps = log_weights - torch.log1p(-log_weights.exp().clamp_max(0.5))
    return gaps.scatter(-1, best, top - others)


def softmax_slope(nearest: Tensor, largest: Tensor, moves: Tensor) -> Tensor:
    r"""Upper bound on :math:`\|p' - p\| / \|s' - s\|` for logits whose gaps move by at most c.

    Along the segment of logits the Jacobian has norm at most :math:`\max_j 2p_j(1-p_j)`,
    :math:`\max_j p_j` and 1/2, and each :math:`z_j = \mathrm{logit}(p_j)` has moved by at most ct
    (see `gap_moves`; also :math:`c = \sqrt2\|s' - s\|`). So with :math:`m = \min_j |z_j|`,
    :math:`M = \max_j z_j` and the logistic function :math:`\sigma`, the slope is at most the mean over
    t in [0, 1] of :math:`2\sigma'(\max(0, m - ct))` and of :math:`\sigma(M + ct)`:

    .. math:: \frac{2(\sigma(m) - \sigma(m-c))}{c} \;\; (c \le m), \quad
              \frac{\tanh(m/2) + (c-m)/2}{c} \;\; (c > m), \quad
              \frac1c \log\frac{1+e^{M+c}}{1+e^M}.

    Grows with c.

    Args:
        nearest: m, (*).
        largest: M, (*).
        moves: c, (*).

    Returns:
        (*), at most 1/2.
    """
    c = moves
    safe = torch.where(c > 0, c, 1.0)
    # sigma(a) - sigma(b) = sigma(a) sigma(-b) (1 - e^(b - a)), without cancellation.
    shrunk = torch.where(c > 0, -torch.expm1(-c) / safe, 1.0)
    far = 2.0 * torch.sigmoid(c - nearest) * torch.sigmoid(nearest) * shrunk
    near = (torch.tanh(nearest / 2) + (c - nearest) / 2) / safe
    curved = torch.where(c <= nearest, far, near)
    short = torch.log1p(torch.sigmoid(largest) * torch.expm1(c.clamp_max(1.0)))
    zero = torch.zeros_like(c)
    long = torch.logaddexp(largest + c, zero) - torch.logaddexp(largest, zero)
    mass = torch.where(c > 0, torch.where(c <= 1.0, short, long) / safe, torch.sigmoid(largest))
    mass = torch.where(largest.isinf(), 1.0, mass)
    return enlarge(torch.minimum(curved, mass), 256).clamp_max(0.5)


def gap_moves(keys: Tensor, lengths: Tensor) -> Tensor:
    r"""Upper bounds on :math:`\max_k |\delta_j - \delta_k| / \epsilon`, which bounds how a gap moves.

    The logit (i, j) moves by :math:`\delta_j = e_i \cdot z_j + (u_i + e_i A) \cdot e_j`, and
    :math:`\mathrm{logit}(p_j)` on the way at the rate of :math:`\delta_j` less a mean of the others. So
    with :math:`L_i = |u_i| + \epsilon \|A\|` it moves by at most :math:`|e_i| |z_j - z_k| + L_i (|e_j| +
    |e_k|)`, and since :math:`|e_i|^2 + |e_j|^2 + |e_k|^2 \le \epsilon^2` (i may be j or k) by at most
    :math:`\epsilon ((|z_j - z_k| + L_i)^2 + L_i^2)^{1/2}`.

    Args:
        keys: :math:`\max_k |z_j - z_k|`, (*, H, N).
        lengths: L, (*, H, N).

    Returns:
        (*, H, N, N), of row i and token j.
    """
    lengths = lengths[..., None]
    return ((keys[..., None, :] + lengths).square() + lengths.square()).sqrt()


def row_caps(weights: Tensor, allowed: Tensor) -> Tensor:
    r"""The largest :math:`\|p' - p\|` of any weights p' of the allowed entries, (*, N) -> (*,).

    A convex function of p', so that it is largest at a corner:
    :math:`(1 + \|p\|^2 - 2 \min_j p_j)^{1/2}`, over allowed j.
    """
    least = weights.masked_fill(~allowed, torch.inf).amin(-1)
    return enlarge((1.0 + weights.square().sum(-1) - 2.0 * least).clamp_min(0.0).sqrt())


def spreads(rows: Tensor, weights: Tensor, allowed: Tensor) -> Tensor:
    """Distances |y_j - sum_k P_ik y_k| of rows (*, N, E) from their means, (*, N, N), 0 where masked."""
    # Not through products, whose cancellation costs half of the digits.
    far = torch.cdist(weights @ rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    return far.masked_fill(~allowed, 0.0)


def second_moments(high: Tensor, spread: Tensor) -> Tensor:
    r"""Upper bound on :math:`\sum_j p_{ij} d_{ij}^2` for weights :math:`p \le \hat P` that sum to one.

    At most :math:`\sum_j \hat P_{ij} d_{ij}^2` and :math:`\max_j d_{ij}^2`; (*, N, N) -> (*, N).
    """
    square = spread.square()
    return torch.minimum((high * square).sum(-1), square.amax(-1))


def covariance_term(
    eps: Tensor, high: Tensor, key_spread: Tensor, value_spread: Tensor, lengths: Tensor
) -> Tensor:
    r"""Upper bound on :math:`\|\sum_h (P_h' - P_h) X W_h\|` through covariances: the best for small eps.

    With weights on the way of at most :math:`\hat P_{ij}` and the second moments
    :math:`\kappa_i = \sum_j \hat P_{ij} |(x_j - m_i) A^\top|^2`,
    :math:`\nu_i = \sum_j \hat P_{ij} |(x_j - m_i) W|^2` it is at most (docs/theory, section 7)

    .. math:: \epsilon \max_i \sum_h (\kappa_i \nu_i)^{1/2} + \epsilon \sum_h
              \bigl(\max_j \textstyle\sum_i \hat P_{ij}\, \nu_i\, (|u_i| + \epsilon\|A\|)^2\bigr)^{1/2}.

    Args:
        eps: (*,).
        high: upper bounds on the weights, (*, H, N, N).
        key_spread: |(x_j - m_i) A^T|, (*, H, N, N).
        value_spread: |(x_j - m_i) W|, (*, H, N, N).
        lengths: |u_i| + eps ||A||, (*, H, N).

    Returns:
        (*,).
    """
    keys = second_moments(high, key_spread)
    values = second_moments(high, value_spread)
    own = (keys * values).sqrt().sum(-2).amax(-1)
    pull = (values * lengths.square())[..., None]
    others = (high.mT @ pull)[..., 0].amax(-1).sqrt().sum(-1)
    return eps * (own + others)


def jacobian_norm(
    weights: Tensor,
    keys: Tensor,
    queries: Tensor,
    mixed: Tensor,
    values: Tensor,
    residual: float,
    scale: float,
) -> Tensor:
    r"""Upper bound on the norm of the Jacobian at X, from its whole (N E, N D) matrix.

    Logit (i, j) of a head moves by :math:`e_i \cdot z_j + u_i \cdot e_j` with the rows of E, so row i by

    .. math:: r e_i + s \sum_h \Bigl( \sum_j p_{ij} e_j W + \sum_j p_{ij}
              (e_i \cdot z_j + u_i \cdot e_j) (y_j - m_i) \Bigr), \quad m_i = \sum_j p_{ij} y_j.

    Args:
        weights: P, (*, H, N, N).
        keys: z, rows of C X A^T, (*, H, N, D).
        queries: u, rows of X A + 1 b, (*, H, N, D).
        mixed: y, rows of C X W, (*, H, N, E).
        values: W, (H, D, E).
        residual: r.
        scale: s.

    Returns:
        (*,).
    """
    pulled = weights[..., None] * (mixed[..., None, :, :] - (weights @ mixed)[..., :, None, :])
    whole = torch.einsum("...hij,hde->...iejd", weights, values)
    whole += torch.einsum("...hije,...hid->...iejd", pulled, queries)
    # A view: element (.., e, d, i) is entry (i, e, i, d).
    own = whole.diagonal(dim1=-4, dim2=-2)
    own += torch.einsum("...hije,...hjd->...edi", pulled, keys)
    whole *= scale
    if residual:
        own += residual * torch.eye(values.shape[1], dtype=own.dtype, device=own.device)[..., None]
    return norm_bound(whole.flatten(-2).flatten(-3, -2))


def remainder_term(
    eps: Tensor,
    weights: Tensor,
    high: Tensor,
    key_spread: Tensor,
    value_spread: Tensor,
    lengths: Tensor,
    diameters: Tensor,
    logit_norm: Tensor,
    value_norm: Tensor,
) -> Tensor:
    r"""Upper bound on :math:`\|f(X + E) - f(X) - Df(X) E\|`, of order :math:`\epsilon^2`.

    .. math:: \epsilon^2 \Bigl( \tfrac12 \max_i (V_i s_i)\, S + \|A\| \max_{ij} (p_{ij} \nu_i)^{1/2} +
              \max_i s_i\, \bigl(\max_j \textstyle\sum_i \hat P_{ij}\bigr)^{1/2} \|W\| \Bigr)

    with :math:`\kappa_i = \sum_j \hat P_{ij} |z_j - \bar z_i|^2`,
    :math:`s_i = \sqrt{\kappa_i} + L_i \max_j \hat P_{ij}^{1/2}`,
    :math:`S = \max_i \sqrt{\kappa_i} + (\max_j \sum_i L_i^2 \hat P_{ij})^{1/2}` and
    :math:`\nu_i = \sum_j p_{ij} |v_j - m_i|^2` (docs/theory, section 7).

    Args:
        eps: (*,).
        weights: P, (*, H, N, N).
        high: upper bounds on the weights on the way, (*, H, N, N).
        key_spread: |z_j - \bar z_i|, (*, H, N, N).
        value_spread: |v_j - m_i|, (*, H, N, N).
        lengths: L, (*, H, N).
        diameters: V, (*, H, N).
        logit_norm: ||A||, (H,) or (*, H).
        value_norm: ||W||, (H,) or (*, H).

    Returns:
        (*,), the sum over heads.
    """
    own = second_moments(high, key_spread).sqrt()
    each = own + lengths * high.amax(-1).sqrt()
    together = own.amax(-1) + (high.mT @ lengths.square()[..., None])[..., 0].amax(-1).sqrt()
    bent = 0.5 * (diameters * each).amax(-1) * together
    variances = (weights * value_spread.square()).sum(-1)
    crossed = logit_norm * (weights.amax(-1) * variances).amax(-1).sqrt()
    carried = each.amax(-1) * high.sum(-2).amax(-1).sqrt() * value_norm
    return eps.square() * (bent + crossed + carried).sum(-1)
