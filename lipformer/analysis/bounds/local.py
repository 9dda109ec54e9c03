r"""Upper bounds on dot-product attention's local Lipschitz constant at one input.

Notation: :math:`q_i = x_i A + b`, weights P, means :math:`m_i` and covariances :math:`C_i` of the tokens
under :math:`P_i`. The derivative along e, per head, before the values W:

.. math:: \textstyle\sum_j P_{ij} e_j + e_i A C_i + \sum_j P_{ij} \langle q_i, e_j\rangle (x_j - m_i)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lipformer.analysis.bounds.ball import combine_heads, joint_norm, root
from lipformer.analysis.inputs import check_order, check_tokens
from lipformer.analysis.maps import Attention, attention_maps, finite_maps
from lipformer.functional import spectral_norm_bound
from lipformer.functional.attention.maps import AttentionMaps
from lipformer.functional.rounding import UNIT, enlarge, round_up
from lipformer.functional.spectral.rounding import frobenius_norm

METHODS = ("min", "sharp", "jasmin")

_CHUNK = 2**22
"""Largest number of float64 entries in one block of covariances: 32 MB."""


def local_bound(
    attn: Attention,
    x: Tensor,
    mask: Tensor | None = None,
    *,
    method: str = "min",
) -> Tensor:
    r"""Upper bound on the local Lipschitz constant at the tokens x: of the norm of the Jacobian there.

    Norm: Frobenius over all tokens. Domain: the one input x; it says nothing about others.

    * "sharp": the three terms of the derivative one by one (`_mixing`, `_own_and_feedback`). For one
    head

      .. math:: \|P\|\|W\| + \max_i \|A C_i W\|
                + \max_j \Big\|\sum_i P_{ij} \|W^\top C_i W\|\, q_i^\top q_i\Big\|^{1/2}

      which is at most
      :math:`\|W\| (\|P\| + \max_i \|A C_i\| + (\max_j \sum_i P_{ij} \|q_i\|^2 \|C_i\|)^{1/2})`.
      Equality: tokens that are all equal, for one.
    * "jasmin" (Yudin et al. 2025, with x centred and the query bias kept): per head

      .. math:: \|P\| + \max_i p_1 (1 - p_1 + p_2)\,\big(\|X_c\|^2\|A\| + \|X_c\|\|XA + 1b\|\big)

      :math:`p_1 \ge p_2` the two largest weights of row i, since
      :math:`\|\mathrm{diag}\,p - p^\top p\| \le p_1(1 - p_1 + p_2)` and
      :math:`C_i = X_c^\top(\mathrm{diag}\,p - p^\top p)X_c` for :math:`X_c = X - 1c` with any c. Joined
      by `combine_heads`. Cheap: no covariance is made.
    * "min": the smaller of both.

    Works in float64, adds more than its rounding errors (`_slack`) and rounds up. Differentiable in x
    and the weights; derivatives are those of the formula.

    Args:
        attn: maps, or a layer that `attention_maps` knows.
        x: tokens (*, N, D).
        mask: bool, True where token i may see token j, broadcastable to (*, 1, N, N).
        method: "min", "sharp" or "jasmin".

    Returns:
        (*,) in x's dtype, but at least float32.

    Example:
        >>> maps = AttentionMaps(-torch.eye(1)[None], torch.eye(1)[None])
        >>> x = torch.tensor([[2.0], [-2.0], [0.0]], dtype=torch.float64)
        >>> {method: round(local_bound(maps, x, method=method).item(), 3) for method in METHODS}
        {'min': 4.315, 'sharp': 4.315, 'jasmin': 6.436}
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    maps = finite_maps(attn)
    check_tokens(x, maps.logits.shape[-1])
    check_order(attn, x)
    wide = x.double()
    weights = maps.weights(wide, mask)
    norms = spectral_norm_bound(maps.values)
    found = []
    if method != "jasmin":
        mixing = _mixing(weights, maps.values, norms)
        found.append(mixing + _own_and_feedback(maps, wide, weights, norms))
    if method != "sharp":
        found.append(_jasmin(maps, wide, weights, norms))
    bound = torch.stack(found).amin(0) + _slack(maps, wide)
    # Weights and tokens are finite, so that NaN is an overflow: of an upper bound, infinity.
    bound = torch.where(bound.isnan(), torch.inf, bound)
    value = bound.to(torch.promote_types(x.dtype, torch.float32))
    # The gradient is that of the conversion; two neighbours differ by a power of two, so that the sum is
    # the larger one exactly.
    above = round_up(bound.detach(), value.dtype) - value.detach()
    return value + torch.where(value.isfinite(), above, 0.0)


def jasmin_loss(attn: Attention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""The part of JaSMin's bound that depends on the weights, as a regulariser.

    .. math:: \frac1H \sum_h \log \max_i\, p_1 (1 - p_1 + p_2)

    with :math:`p_1 \ge p_2` the two largest weights of row i: the logarithm of a bound of the softmax's
    Jacobian, at most log 1/2, small where rows are spread or saturated. Source: Yudin et al. 2025.

    Args:
        attn: maps, or a layer that `attention_maps` knows.
        x: tokens (*, N, D).
        mask: as in `local_bound`.

    Returns:
        (*,) in x's dtype; differentiable in x and the weights.
    """
    maps = attention_maps(attn)
    check_tokens(x, maps.logits.shape[-1])
    check_order(attn, x)
    steepest = _softmax_gain(maps.weights(x, mask)).amax(-1)
    return steepest.clamp_min(torch.finfo(steepest.dtype).tiny).log().mean(-1)


def _softmax_gain(weights: Tensor) -> Tensor:
    """p1 (1 - p1 + p2) of every row, (*, N) -> (*,): at least the norm of diag p - p^T p."""
    if weights.shape[-1] == 1:
        return torch.zeros_like(weights[..., 0])
    top, place = weights.topk(2, dim=-1)
    # 1 - p1 as the sum of the others: of a saturated row the difference would be noise.
    others = weights.scatter(-1, place[..., :1], 0.0).sum(-1)
    return top[..., 0] * (others + top[..., 1])


def _jasmin(maps: AttentionMaps, x: Tensor, weights: Tensor, norms: Tensor) -> Tensor:
    spread = spectral_norm_bound(x - x.mean(-2, keepdim=True))[..., None]
    reach = spread.square() * spectral_norm_bound(maps.logits)
    reach = reach + spread * spectral_norm_bound(maps.queries(x))
    gains = spectral_norm_bound(weights) + _softmax_gain(weights).amax(-1) * reach
    return combine_heads(gains, maps.values, norms)


def _mixing(weights: Tensor, values: Tensor, norms: Tensor) -> Tensor:
    r"""Upper bound on :math:`\|\sum_h P_h \otimes W_h\|`, P (*, H, N, N), W (H, D, E) -> (*,).

    For one head the product of the norms. For more the smallest of

    .. math:: \|\sum_h c_h^2 P_h^\top P_h\|^{1/2} \|\sum_h W_h^\top W_h/c_h^2\|^{1/2}, \quad
              \|\sum_h c_h^2 P_h P_h^\top\|^{1/2} \|\sum_h W_h W_h^\top/c_h^2\|^{1/2}

    (the heads as a stack of maps before or after the values), c = 1 and :math:`c_h^2 = \|W_h\|`, each
    also for :math:`P_h - \bar P` beside :math:`\|\bar P\| \|\sum_h W_h\|` with the mean :math:`\bar P`
    over heads.
    """
    if values.shape[0] == 1:
        return spectral_norm_bound(weights[..., 0, :, :]) * norms[0]
    mean = weights.mean(-3)
    shared = spectral_norm_bound(mean) * spectral_norm_bound(values.sum(0))
    deviation = weights - mean[..., None, :, :]
    found = []
    for square in (torch.ones_like(norms), norms.clamp_min(1e-150)):
        scale = root(square)[:, None, None]
        before = joint_norm(values, square)
        after = joint_norm(values.mT, square)
        for matrices, rest in ((weights, 0.0), (deviation, shared)):
            tall = spectral_norm_bound((scale * matrices).flatten(-3, -2))
            wide = spectral_norm_bound((scale * matrices).transpose(-3, -2).flatten(-2))
            found += [tall * before + rest, wide * after + rest]
    return torch.stack(found).amin(0)


def _own_and_feedback(maps: AttentionMaps, x: Tensor, weights: Tensor, norms: Tensor) -> Tensor:
    r"""Upper bound on the second and the third term of the derivative, all heads and values together.

    .. math:: \max_i \Big\|\sum_h A_h C^h_i W_h\Big\| +
              \max_j \Big\|\sum_{ih} \kappa_i c_h^2 P^h_{ij}\, q_i^{h\top} q^h_i\Big\|^{1/2}, \qquad
              \kappa_i = \Big\|\sum_h W_h^\top C^h_i W_h / c_h^2\Big\|

    for any :math:`c_h > 0` (docs/theory, section 7); the smaller of c = 1 and
    :math:`c_h^2 = \|W_h\| / \max_i \|q^h_i\|` is taken.
    """
    values, query = maps.values, maps.queries(x)
    longest = torch.linalg.vector_norm(query, dim=-1).amax(-1)  # (*, H)
    squares = [torch.ones_like(longest)]
    if values.shape[0] > 1:
        squares.append((norms / longest.clamp_min(1e-150)).clamp_min(1e-150))
    roots = root(weights)
    # x_j A^T and x_j W less their means under P_i: products with C_i itself would cost D times as much.
    sides = [x[..., None, :, :] @ maps.logits.mT, x[..., None, :, :] @ values]
    own, spreads = torch.zeros_like(x[..., 0, 0]), []
    for rows in _chunks(x, values):
        scaled = roots[..., rows, :, None]
        before, after = (
            scaled * (side[..., None, :, :] - (weights[..., rows, :] @ side)[..., None, :])
            for side in sides
        )  # (*, H, c, N, D) and (*, H, c, N, E)
        own = _largest_norm(_stacked(before).mT @ _stacked(after), own)
        # kappa's root is the norm of sqrt(P) (x_j - m_i) W: squares would lose half the digits.
        spreads.append(
            [spectral_norm_bound(_stacked(after / root(c)[..., None, None, None])) for c in squares]
        )
    feedback = []
    for square, parts in zip(squares, zip(*spreads, strict=True), strict=True):
        scale = root(square)[..., None] * torch.cat(parts, dim=-1)[..., None, :]  # (*, H, N)
        scaled = roots.mT * scale[..., None, :]  # (*, H, keys j, rows i)
        largest = torch.zeros_like(own)
        for keys in _chunks(x, values):
            stacks = _stacked(scaled[..., keys, :, None] * query[..., None, :, :])
            largest = _largest_norm(stacks, largest)
        feedback.append(largest)
    return own + torch.stack(feedback).amin(0)


def _stacked(parts: Tensor) -> Tensor:
    """The rows of all heads below one another, (*, H, c, N, E) -> (*, c, H N, E)."""
    return parts.transpose(-4, -3).flatten(-3, -2)


def _largest_norm(matrices: Tensor, largest: Tensor) -> Tensor:
    """Upper bound on the largest norm of c matrices and what others have, (*, c, m, n), (*,) -> (*,).

    From the largest Frobenius norm down, until none of the rest can pass what was found.
    """
    sizes, order = enlarge(frobenius_norm(matrices.detach())).sort(dim=-1, descending=True)
    start, stop = 0, 1
    # Not `any(size > largest)`: sizes that overflow are to be looked at.
    while start < sizes.shape[-1] and not bool((sizes[..., start] <= largest).all()):
        some = torch.take_along_dim(matrices, order[..., start:stop, None, None], dim=-3)
        largest = torch.maximum(largest, spectral_norm_bound(some).amax(-1))
        start, stop = stop, 2 * stop
    return largest


def _chunks(x: Tensor, values: Tensor) -> Iterator[slice]:
    """Slices of the tokens, so that (*, H, c, N, max(D, E)) and (*, c, D, E) are within `_CHUNK`."""
    n, width = x.shape[-2], max(values.shape[-2:])
    each = max(1, x[..., 0, 0].numel()) * max(values.shape[0] * n, width) * width
    size = max(1, min(n, _CHUNK // each))
    return (slice(start, start + size) for start in range(0, n, size))


@torch.no_grad()
def _slack(maps: AttentionMaps, x: Tensor) -> Tensor:
    r"""More than the rounding errors of the formulas in float64, (*,).

    With r the longest token, a logit errs by at most :math:`(2D + 4)u\,\beta`,
    :math:`\beta = r(r\|A\|_F + \|b\|)`, a weight relatively by twice that and :math:`(N + 8)u`. A
    covariance with a wrong mean is too large, never too small; the sums over keys and products with A
    and W err by :math:`(N + 3D)u` of the products of their factors' norms, which are at most
    :math:`\sqrt N (1 + \beta) \|W\|_F` for every term.
    """
    n, d = x.shape[-2:]
    longest = torch.linalg.vector_norm(x, dim=-1).amax(-1)[..., None]
    size = longest * torch.linalg.matrix_norm(maps.logits)
    if maps.offset is not None:
        size = size + torch.linalg.vector_norm(maps.offset, dim=-1)
    reach = ((1 + longest * size).square() * torch.linalg.matrix_norm(maps.values)).sum(-1)
    return 8 * (n + d + maps.values.shape[-1] + 8) * UNIT * n**0.5 * reach
