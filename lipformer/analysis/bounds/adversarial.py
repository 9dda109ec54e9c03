r"""Tokens at which dot-product attention is steep on a ball, and the lower bounds that they prove.

One outlier R u among copies of a point s R u, s = -1 or 1/2, u a unit vector: all copies look at the
outlier with the same weight p. With the query :math:`q = s R\,uA + b` of the copies and the gap of the
logits :math:`\Delta = (1 - s) R \langle q, u\rangle`, moving the outlier alone by e moves the mean that
a copy sees by

.. math:: e M, \qquad M = p I + p(1-p)(1-s)R\; q^\top u, \qquad p = \sigma(\Delta + \log\text{odds})

where the odds are the outlier's mass over that of the copies in sight. Along e = u it is
:math:`p + \Delta\,p(1-p)`. For one head with W = I and u an eigenvector of A this is the construction of
Castin, Ablin, Peyré 2024; only the quadratic form of A matters, so that A need not be symmetric. s = -1
needs :math:`\langle uA, u\rangle < 0`, s = 1/2 a positive one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipformer.analysis.bounds.ball import check_ball
from lipformer.analysis.maps import Attention
from lipformer.functional.attention.maps import AttentionMaps
from lipformer.functional.rounding import ROUND_UP

_DOWN = 1 - 1e-9
"""Lower bounds are rounded down by this: far more than the errors of a float64 SVD."""

_LEAST_LOG_ODDS = -600.0
"""So that masses and gains stay finite."""


class _Outlier(NamedTuple):
    """A configuration: u (D,), s, the copies' query q (H, D) and the gap of the logits (H,)."""

    direction: Tensor
    copies: float
    query: Tensor
    gap: Tensor


def adversarial_tokens(attn: Attention, n: int, radius: float, *, causal: bool | None = None) -> Tensor:
    """Tokens (n, D) in a ball whose local gain is at least `ball_lower_bound`: one outlier, then copies.

    The gain of the layer there grows like the root of n until :math:`n ~ e^{2gR^2}`. Where a layer's
    values make the origin steeper than every outlier, all tokens are zero.

    Args:
        attn: maps, or a layer that `attention_maps` knows.
        n: number of tokens.
        radius: R.
        causal: token i sees tokens j <= i; None takes it from the maps.

    Returns:
        (n, D), float64, the outlier first.
    """
    maps, radius, causal = check_ball(attn, radius, causal, n)
    best = _steepest(maps, radius, _log_odds(n, causal, maps))[1]
    return _points(maps, best, radius, n)


def ball_lower_bound(attn: Attention, n: int, radius: float, *, causal: bool | None = None) -> float:
    r"""Lower bound on the Lipschitz constant on n tokens in a ball, reached at `adversarial_tokens`.

    Frobenius norm over tokens, as in `ball_bound`:

    .. math:: \Big\|\Big[\sum_h M^{(i)}_h W_h\Big]_{i = 2..n}\Big\|

    with M of this module's head and odds 1/(n - 1), or 1/(i - 1) for causal attention: the exact norm of
    what moving the outlier does to the copies. For one head with W = I and
    :math:`g = \max(-g_{\min}, g_{\max}/8)` of the eigenvalues of the symmetric part of A it is at least

    .. math:: \sqrt{n-1}\,[p + 2gR^2 p(1-p)] \ge \frac{\sqrt{n-1}}{1 + (n-1)e^{-2gR^2}}, \qquad
              p = \frac1{1 + (n-1)e^{-2gR^2}}

    Never below the gain :math:`\|\sum_h W_h\|` at tokens that are all zero.

    Args:
        attn: maps, or a layer that `attention_maps` knows.
        n: number of tokens.
        radius: R.
        causal: None takes it from the maps.

    Example:
        >>> maps = AttentionMaps(-torch.eye(2)[None], torch.eye(2)[None])
        >>> [round(ball_lower_bound(maps, n, radius=1.0), 2) for n in (2, 10, 1000)]
        [1.09, 2.84, 1.0]
    """
    maps, radius, causal = check_ball(attn, radius, causal, n)
    return _steepest(maps, radius, _log_odds(n, causal, maps))[0] * _DOWN


def adversarial_measure(attn: Attention, radius: float) -> tuple[Tensor, Tensor]:
    """Two Diracs on a ball whose W2 gain is at least `mean_field_lower_bound`.

    Args:
        attn: maps, or a layer that `attention_maps` knows.
        radius: R.

    Returns:
        Points (2, D), the outlier first, and masses (2,), in float64.
    """
    maps, radius, _ = check_ball(attn, radius, None)
    _, best, log_odds = _steepest_measure(maps, radius)
    masses = torch.stack([log_odds.sigmoid(), (-log_odds).sigmoid()])
    return _points(maps, best, radius, 2), masses


def mean_field_lower_bound(attn: Attention, radius: float) -> float:
    r"""Lower bound on the W2 Lipschitz constant on measures in a ball, reached at `adversarial_measure`.

    .. math:: \max_{u, s, a} \sqrt{(1-a)/a}\; \Big\|\sum_h M_h W_h\Big\|

    over masses a of the outlier. For one head with W = I, :math:`g = -g_{\min}` and
    :math:`a = 1/(1 + e^{2gR^2})` this is :math:`\frac12 (1 + gR^2) e^{gR^2}` (Castin, Ablin, Peyré
    2024); masses with :math:`p/(1-p)` from 1/10 to 3 are tried as well, and 1/3 is best for large
    :math:`gR^2`: 1.3 times as much. It holds for causal attention too, the outlier before the copies.

    Args:
        attn: maps, or a layer that `attention_maps` knows.
        radius: R.
    """
    maps, radius, _ = check_ball(attn, radius, None)
    return _steepest_measure(maps, radius)[0] * _DOWN


def _log_odds(n: int, causal: bool, maps: AttentionMaps) -> Tensor:
    """Logarithm of the outlier's odds for each copy, (n - 1,)."""
    place: dict[str, Any] = {"dtype": torch.float64, "device": maps.logits.device}
    if causal:
        return -torch.arange(1, n, **place).log()
    return -torch.full((n - 1,), max(n - 1, 1), **place).log()


def _outliers(maps: AttentionMaps, radius: float) -> list[_Outlier]:
    """Both signs of the extreme eigenvectors of every head's symmetric part, both places of copies."""
    vectors = torch.linalg.eigh(maps.logits + maps.logits.mT).eigenvectors
    extreme = torch.cat([vectors[..., 0], vectors[..., -1]])
    found = []
    for u in (*extreme, *-extreme):
        for copies in (-1.0, 0.5):
            query = copies * radius * (u @ maps.logits)
            if maps.offset is not None:
                query = query + maps.offset
            found.append(_Outlier(u, copies, query, (1 - copies) * radius * (query @ u)))
    return found


def _coefficients(outlier: _Outlier, log_odds: Tensor) -> Tensor:
    """p and p (1 - p) of each head for log odds (T,): (T, 2, H)."""
    logit = outlier.gap + log_odds[:, None]
    p = logit.sigmoid()
    return torch.stack([p, p * (-logit).sigmoid()], dim=1)


def _along_direction(maps: AttentionMaps, outlier: _Outlier, log_odds: Tensor) -> Tensor:
    """Length of what each copy's output moves by, the outlier moving by u: (T,)."""
    p, slope = _coefficients(outlier, log_odds).unbind(1)
    images = torch.einsum("d,hde->he", outlier.direction, maps.values)
    return torch.linalg.vector_norm((p + outlier.gap * slope) @ images, dim=-1)


def _norm(maps: AttentionMaps, outlier: _Outlier, log_odds: Tensor, radius: float) -> Tensor:
    """Norm of the map from the outlier to all copies' outputs, for the log odds of each (T,).

    Each copy's matrix is a combination of the 2 H matrices W and (1 - s) R q^T u W. With R the
    triangular factor of the coefficients (T, 2 H), the stack over copies has the norm of the one over
    rows of R.
    """
    turned = torch.einsum(
        "hd,e,hef->hdf", outlier.query, (1 - outlier.copies) * radius * outlier.direction, maps.values
    )
    basis = torch.cat([maps.values, turned])
    triangle = torch.linalg.qr(_coefficients(outlier, log_odds).flatten(1), mode="r").R
    stacked = torch.einsum("rk,kde->dre", triangle, basis).flatten(1)
    return torch.linalg.matrix_norm(stacked, ord=2)


@torch.no_grad()
def _steepest(maps: AttentionMaps, radius: float, log_odds: Tensor) -> tuple[float, _Outlier | None]:
    """The largest norm and its outlier; None for tokens that are all zero."""
    calm = float(torch.linalg.matrix_norm(maps.values.sum(0), ord=2))
    if not len(log_odds):
        return calm, None
    best = max(
        _outliers(maps, radius),
        key=lambda one: float(torch.linalg.vector_norm(_along_direction(maps, one, log_odds))),
    )
    value = float(_norm(maps, best, log_odds, radius))
    return (value, best) if value > calm else (calm, None)


@torch.no_grad()
def _steepest_measure(maps: AttentionMaps, radius: float) -> tuple[float, _Outlier | None, Tensor]:
    """The largest W2 gain, its outlier (None: all mass at zero) and log odds."""
    place: dict[str, Any] = {"dtype": torch.float64, "device": maps.logits.device}
    odds = torch.cat([torch.zeros(1, **place), torch.linspace(0.1, 3.0, 59, **place).log()])
    best, score, chosen = None, -1.0, torch.zeros((), **place)
    for outlier in _outliers(maps, radius):
        log_odds = (odds - outlier.gap[:, None]).flatten().clamp_min(_LEAST_LOG_ODDS)
        gains = (-log_odds / 2).exp() * _along_direction(maps, outlier, log_odds)
        top = int(gains.argmax())
        if float(gains[top]) > score:
            best, score, chosen = outlier, float(gains[top]), log_odds[top]
    calm = float(torch.linalg.matrix_norm(maps.values.sum(0), ord=2))
    assert best is not None  # the list of outliers is never empty
    value = float((-chosen / 2).exp() * _norm(maps, best, chosen[None], radius))
    return (value, best, chosen) if value > calm else (calm, None, torch.zeros((), **place))


def _points(maps: AttentionMaps, outlier: _Outlier | None, radius: float, n: int) -> Tensor:
    x = maps.logits.new_zeros(n, maps.logits.shape[-1])
    if outlier is not None:
        # A hair inside the ball, so that rounding leaves no token outside.
        x[:] = outlier.copies * (radius / ROUND_UP) * outlier.direction
        x[0] = radius / ROUND_UP * outlier.direction
    return x
