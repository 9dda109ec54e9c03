"""LoFAST's second way: the norm of the Jacobian at the input, and a remainder of order two.

Shapes: tokens (*, N, D), weights of attention (*, H, N, N); everything in float64 without gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipformer.analysis._lofast_terms import norm_bound, second_moments


def jacobian_norm(
    weights: Tensor,
    keys: Tensor,
    queries: Tensor,
    mixed: Tensor,
    values: Tensor,
    residual: float,
    scale: float,
) -> Tensor:
    r"""Upper bound of the norm of the Jacobian at X, from its whole (N E, N D) matrix.

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
    r"""Upper bound of :math:`\|f(X + E) - f(X) - Df(X) E\|`, of order :math:`\epsilon^2`.

    Let :math:`\delta_j` be the change of the logits of row i, :math:`v_j` the values at X. Then
    :math:`(P' - P)(X + E)W` differs from its linear part by three terms.

    1. The second derivative of the softmax along :math:`\delta`, integrated: at most half the largest
       :math:`|E_p[(\delta - \bar\delta)^2 (v - \bar v)]| \le V_i \sigma_i^2`, with :math:`V_i` the
       largest distance of a value from a mean on the way and :math:`\sigma_i` the standard deviation of
       :math:`\delta`. As :math:`\delta_j = e_i \cdot z_j + (u_i + e_i A) \cdot e_j` and every weight on
       the way is at most :math:`\hat P_{ij}`,
       :math:`\sigma_i \le |e_i| \sqrt{\kappa_i} + L_i (\sum_j \hat P_{ij} |e_j|^2)^{1/2}`, where
       :math:`\kappa_i = \sum_j \hat P_{ij} |z_j - \bar z_i|^2`, :math:`L_i = |u_i| + \epsilon \|A\|`.
       Hence :math:`\sigma_i \le \epsilon s_i`, :math:`s_i = \sqrt{\kappa_i} + L_i \max_j
       \hat P_{ij}^{1/2}`, and :math:`(\sum_i \sigma_i^2)^{1/2} \le \epsilon S`, :math:`S = \max_i
       \sqrt{\kappa_i} + (\max_j \sum_i L_i^2 \hat P_{ij})^{1/2}`. Together
       :math:`\tfrac12 \epsilon^2 \max_i (V_i s_i)\, S`.
    2. The covariance of :math:`e_i A \cdot e_j` and the values: :math:`\epsilon^2 \|A\| \max_{ij}
       (p_{ij} \nu_i)^{1/2}` with :math:`\nu_i = \sum_j p_{ij} |v_j - m_i|^2`.
    3. :math:`(P' - P) E W`, a covariance of :math:`\delta` and :math:`e_j W` on the way:
       :math:`\epsilon^2 \max_i s_i\, (\max_j \sum_i \hat P_{ij})^{1/2} \|W\|`.

    Args:
        eps: (*,).
        weights: P, (*, H, N, N).
        high: upper bounds of the weights on the way, (*, H, N, N).
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
