r"""The bound of L2 multi-head attention (docs/theory, section 2).

:math:`F(X) = \sum_h P_h(Y_h) Y_h M_h` with :math:`Y_h = X W_h`: a gain :math:`G_h` for each head,
the rest linear.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lipformer.certificate._linear_rules import linf_norm
from lipformer.functional import spectral_norm_bound


def _norm(weight: Tensor) -> Tensor:
    # The factor covers the rounding of a float64 product that formed the weight.
    return spectral_norm_bound(weight).double() * (1.0 + 1e-12)


def positive(bound: Tensor) -> Tensor:
    """Keeps a bound that is divided by away from zero, as a larger bound.

    A bound of exactly 0 becomes 1: such a module (a zero-initialised output, or a custom layer whose
    tokens have no effect on themselves, in the self norm) has the constant 0 at any scale, so that
    there is nothing to divide by, and what the bound does not see (biases, gradients, the effect on
    other tokens) must not be enlarged. Other small bounds are raised to 1e-6, so that gradients stay
    finite.
    """
    # threshold, whose derivative is one kernel where that of clamp_min is three.
    return F.threshold(bound, 1e-6, 1e-6).masked_fill(bound == 0.0, 1.0)


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
    return rows.amax() * (1.0 + (q.shape[0] * d + 16) * 2.0**-52)


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
