"""Upper bounds on dot-product attention's Lipschitz constant on a ball, for n tokens and for any n."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lipformer.analysis.maps import Attention, finite_maps
from lipformer.functional import spectral_norm_bound
from lipformer.functional.attention.maps import AttentionMaps
from lipformer.functional.rounding import enlarge

_EXPONENTS = 257
"""Exponents s in [1, 2) tried in Hardy's inequality; each of them is sound."""


def combine_heads(gains: Tensor, values: Tensor, norms: Tensor | None = None) -> Tensor:
    r"""Upper bound on the gain of :math:`e \mapsto \sum_h T_h(e) W_h` from :math:`\|T_h\| \le L_h`.

    For any :math:`c_h > 0` the heads are one map to the stack of :math:`c_h T_h(e)`, of norm at most
    :math:`(\sum_h c_h^2 L_h^2)^{1/2}`, followed by the stack of :math:`W_h / c_h` on every token:

    .. math:: \min_c\ \Big\|\sum_h W_h^\top W_h / c_h^2\Big\|^{1/2} \Big(\sum_h c_h^2 L_h^2\Big)^{1/2}

    The smallest over three choices is returned. c = 1 and :math:`c_h = \|W_h\|` are the two readings of
    :math:`\|W^O\| (\sum_h L_h^2)^{1/2}` (Castin, Ablin, Peyré 2024), with the values in :math:`W_h` or
    in :math:`L_h`. :math:`c_h^2 = \|W_h\| / L_h` is never above the sum :math:`\sum_h \|W_h\| L_h`: both
    factors are then at most its root.

    Args:
        gains: :math:`L_h`, (*, H), not negative.
        values: :math:`W_h`, (H, D, E).
        norms: bounds of :math:`\|W_h\|`, (H,), where they are known.

    Returns:
        (*,), differentiable; exact up to rounding errors of a few units.
    """
    norms = spectral_norm_bound(values) if norms is None else norms
    if gains.shape[-1] == 1:
        return norms[0] * gains[..., 0]
    tiny = 1e-150  # any positive c is sound: this one only keeps heads of norm or gain zero finite
    squares = (
        torch.ones_like(norms),
        norms.square().clamp_min(tiny),
        (norms / gains.clamp_min(tiny)).clamp_min(tiny),
    )
    found = [joint_norm(values, square) * root((square * gains.square()).sum(-1)) for square in squares]
    return torch.stack(found).amin(0)


def joint_norm(values: Tensor, square: Tensor) -> Tensor:
    r""":math:`\|\sum_h W_h^\top W_h / c_h^2\|^{1/2}` of W (H, D, E) and squares c^2 (*, H): (*,)."""
    return spectral_norm_bound((values / root(square)[..., None, None]).flatten(-3, -2))


def root(x: Tensor) -> Tensor:
    """The square root, with gradient 0 at 0."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)


def ball_bound(
    attn: Attention,
    n: int,
    radius: float,
    *,
    causal: bool | None = None,
    any_mask: bool = False,
) -> float:
    r"""Upper bound on the Lipschitz constant on n tokens in the ball of a radius R.

    Norm: Frobenius over all tokens, in and out. Domain: :math:`\|x_i\| \le R` for all i. Per head, with
    :math:`\alpha = R^2\|A\|` and :math:`\beta = R\,(R\|A\| + \|b\|)` (equal without query bias),

    .. math:: L_h = \|W_h\|\,\big[(1 + \beta)\sqrt c + \alpha\big], \qquad
              c = \frac{n}{1 + (n-1)e^{-2\beta}} \le \min(n, e^{2\beta})

    or causal :math:`c = \sum_{i=1}^n 1/(1 + (i-1)e^{-2\beta})`, or c = n under any mask; heads are
    joined by `combine_heads`. Causal attention also obeys `mean_field_bound`: the smaller of the two is
    returned.

    Proof: docs/theory, section 7.

    Without bias this is below :math:`\sqrt 3\,\|W\| (\alpha^2 (4n+1) + n)^{1/2}`, Theorem 3.3 of Castin,
    Ablin, Peyré (How Smooth Is Attention?, 2024), for :math:`(x+y+z)^2 \le 3(x^2+y^2+z^2)` and c <= n;
    as n grows it tends to `mean_field_bound`.

    Args:
        attn: maps, or a layer that `attention_maps` knows.
        n: number of tokens; the bound holds for fewer too.
        radius: R, the largest norm of a token (`layer_norm_radius` after a LayerNorm).
        causal: token i sees tokens j <= i; None takes it from the maps.
        any_mask: hold for every mask that leaves each token a key (padding, windows).

    Example:
        >>> maps = AttentionMaps(-torch.eye(2)[None], torch.eye(2)[None])
        >>> [round(ball_bound(maps, n, radius=1.0), 2) for n in (2, 10, 1000)]
        [3.65, 5.25, 6.42]
    """
    maps, radius, causal = check_ball(attn, radius, causal, n)
    with torch.no_grad():
        alpha, beta = _logit_ranges(maps, radius)
        if any_mask:
            column = torch.full_like(beta, n)
        elif causal:
            earlier = torch.arange(n, dtype=beta.dtype, device=beta.device)
            column = (1 / (1 + earlier * (-2 * beta[:, None]).exp())).sum(-1)
        else:
            column = n / (1 + (n - 1) * (-2 * beta).exp())
        gains = (1 + beta) * column.sqrt() + alpha
        if causal and not any_mask:
            gains = torch.minimum(gains, _causal_mean_field(alpha, beta))
        return _rounded_up(combine_heads(gains, maps.values), n)


def mean_field_bound(attn: Attention, radius: float, *, causal: bool | None = None) -> float:
    r"""Upper bound on the Lipschitz constant on measures in a ball, for any number of tokens.

    Norm: the Wasserstein distance :math:`W_2` of the token measures (`measure_attention`); for n tokens
    of equal weight it bounds the Frobenius norm too. Domain: measures on the ball of radius R. Per head,
    with :math:`\alpha, \beta` of `ball_bound`,

    .. math:: L_h = \|W_h\|\,[(1 + \beta)\,e^{\beta} + \alpha]

    the limit of `ball_bound`: along an optimal transport the same three terms appear with
    :math:`P_{ij} \le a_j e^{2\beta}`. It is below Castin, Ablin, Peyré's
    :math:`\|W\|(1 + 3\alpha) e^{2\alpha}`.

    Causal: the distance is that of measures on positions and tokens that keeps positions (the root of
    :math:`\sum_i a_i \|x_i - y_i\|^2`). Columns need not have bounded sums, but
    :math:`P_{ij} \le e^{2\beta} a_j / \sum_{k \le i} a_k` for j <= i, and Hardy's inequality bounds the
    running mean in :math:`L^p` by p/(p - 1), p = 2/s. With Hölder's inequality under :math:`P_i` in
    place of Cauchy-Schwarz, and :math:`E|\langle u, x - m\rangle|^{s'} \le (2R)^{s'-2} R^2`, for every s
    in [1, 2)

    .. math:: L_h = \|W_h\|\,\big[(1 + 2^{2/s-1}\beta)\,(2 e^{2\beta} / (2-s))^{1/s} + \alpha\big]

    of which the smallest on a grid of s is taken. s = 1 gives
    :math:`2(1 + 2\beta)e^{2\beta} + \alpha`.

    Args:
        attn: maps, or a layer that `attention_maps` knows.
        radius: R.
        causal: None takes it from the maps.
    """
    maps, radius, causal = check_ball(attn, radius, causal)
    with torch.no_grad():
        alpha, beta = _logit_ranges(maps, radius)
        gains = _causal_mean_field(alpha, beta) if causal else (1 + beta) * beta.exp() + alpha
        return _rounded_up(combine_heads(gains, maps.values), 1)


def layer_norm_radius(norm: int | nn.LayerNorm | nn.RMSNorm) -> float:
    r"""Radius R of a ball that holds every token after a LayerNorm or RMSNorm, rounded up.

    .. math:: \|\gamma \circ y + \beta\| \le \sqrt d\,\max|\gamma| + \|\beta\|, \qquad \|y\| \le \sqrt d

    Args:
        norm: the width d for one without affine part, or the layer, whose normalised entries are the
            token.
    """
    scale, shift = 1.0, 0.0
    if isinstance(norm, int):
        dim = norm
    else:
        dim = math.prod(norm.normalized_shape)
        if norm.weight is not None:
            scale = float(norm.weight.detach().double().abs().max())
        bias = getattr(norm, "bias", None)
        if bias is not None:
            shift = float(torch.linalg.vector_norm(bias.detach().double()))
    return enlarge(math.sqrt(dim) * scale + shift, dim)


def check_ball(
    attn: Attention, radius: float, causal: bool | None, n: int = 1
) -> tuple[AttentionMaps, float, bool]:
    """The maps in float64, the radius and whether they are causal; ValueError for a bad radius or n."""
    if not (n >= 1 and 0 <= radius < math.inf):
        raise ValueError(
            "the number of tokens must be at least 1, the radius finite and not negative, got "
            f"n={n}, radius={radius}"
        )
    maps = finite_maps(attn)
    return maps, float(radius), maps.causal if causal is None else causal


def _logit_ranges(maps: AttentionMaps, radius: float) -> tuple[Tensor, Tensor]:
    r""":math:`\alpha = R^2\|A\|` and :math:`\beta = R(R\|A\| + \|b\|)`, each (H,)."""
    alpha = radius * radius * spectral_norm_bound(maps.logits)
    if maps.offset is None:
        return alpha, alpha
    return alpha, alpha + radius * torch.linalg.vector_norm(maps.offset, dim=-1)


def _causal_mean_field(alpha: Tensor, beta: Tensor) -> Tensor:
    s = torch.linspace(1.0, 2.0, _EXPONENTS + 1, dtype=beta.dtype, device=beta.device)[:-1, None]
    # The power as the exponential of a logarithm: e^(2 beta) may overflow where its root does not.
    hardy = ((2 * beta + (2 / (2 - s)).log()) / s).exp()
    return ((1 + 2 ** (2 / s - 1) * beta) * hardy).amin(0) + alpha


def _rounded_up(bound: Tensor, terms: int) -> float:
    """Up by more than the rounding errors of sums of so many terms, exponentials and products."""
    value = enlarge(float(bound), terms + 4096)
    # Weights and radius are finite, so that NaN is an overflow (infinity times zero): no bound at all.
    return math.inf if math.isnan(value) else value
