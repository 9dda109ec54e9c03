r"""Attention on measures: weighted clouds of tokens, their W2 gain, and what splitting mass adds.

A cloud :math:`\mu = \sum_i a_i \delta_{x_i}` is sent to :math:`\sum_i a_i \delta_{T_\mu(x_i)}` with
weights :math:`P_{ij} \propto a_j e^{S_{ij}}`: doubling a token and halving its weight changes nothing.
Source: Castin, Ablin, Peyré (How Smooth Is Attention?, first version, 2023), for dot-product attention.
What follows here holds for every such map whose logits depend on pairs of tokens, L2 attention included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from lipformer.analysis.inputs import check_order, check_tokens
from lipformer.analysis.maps import Attention, attention_maps
from lipformer.estimates import Estimate, estimate_lipschitz
from lipformer.layers import L2MultiheadAttention
from lipformer.layers.attention.key_ball import bounded

_DENSE = 4096
"""Largest N max(D, E) for which the Jacobian is made."""

_LEAST_LOG = math.log(1e-300)
"""Least logarithm of a weight over the largest: gains divide by the roots of weights."""

_LEAST_MOVE = 1e-8
"""Least W2 distance of the clouds of an attack, of the longest token: its square is the rounding."""

Field = Callable[[Tensor, Tensor, Tensor], Tensor]
"""T_mu at queries (*, M, D), for tokens (*, N, D) with log weights (*, N): (*, M, E)."""


def measure_attention(attn: Attention, x: Tensor, weights: Tensor) -> Tensor:
    r"""Applies attention to a weighted cloud of tokens; equal weights give the layer itself.

    .. math:: T_\mu(x_i) = c + \sum_h \sum_j P^h_{ij}\, x_j W_h, \qquad
              P^h_{ij} = \frac{a_j \exp S^h_{ij}}{\sum_k a_k \exp S^h_{ik}}

    Args:
        attn: what `attention_maps` knows, or `L2MultiheadAttention` of either form, whose logits
            are :math:`S_{ij} = -t\|y_i - y_j\|^2`. Not causal and without positions, as a measure has no
            order.
        x: tokens (*, N, D).
        weights: a, (*, N), positive; only their ratios matter.

    Returns:
        The tokens (*, N, E) of the image, whose weights are a, in x's dtype. Dropout is off.
    """
    logs = _log_weights(attn, x, weights)
    return _field(attn, x.dtype)(x, x, logs.to(x.dtype))


@torch.no_grad()
def measure_gain(attn: Attention, x: Tensor, weights: Tensor) -> Tensor:
    r"""Local gain of `measure_attention` in the Wasserstein distance W2, without splitting mass.

    .. math:: \big\|D_a^{1/2} J D_a^{-1/2}\big\|

    J the Jacobian: small moves e of the tokens are :math:`(\sum_i a_i \|e_i\|^2)^{1/2}` away in W2.
    Exact, from the whole Jacobian in float64; larger clouds: `measure_gain_estimate`.

    Args:
        attn: as in `measure_attention`.
        x: tokens (*, N, D), N max(D, E) <= 4096.
        weights: (*, N).

    Returns:
        (*,), float64.

    Example:
        >>> from lipformer.analysis import AttentionMaps
        >>> maps = AttentionMaps(-torch.eye(1)[None], torch.eye(1)[None])
        >>> x, weights = torch.tensor([[2.0], [-2.0], [0.0]]), torch.ones(3)
        >>> [round(gain(maps, x, weights).item(), 3) for gain in (measure_gain, split_gain)]
        [2.398, 2.667]
    """
    field, x, a = _wide(attn, x, weights)

    def image(tokens: Tensor, weight: Tensor) -> Tensor:
        return field(tokens, tokens, weight.log())

    batch, (n, d) = x.shape[:-2], x.shape[-2:]
    tokens, flat = x.reshape(-1, n, d), a.reshape(-1, n)
    width = max(d, image(tokens[:1], flat[:1]).shape[-1])
    if n * width > _DENSE:
        raise ValueError(
            f"the Jacobian of {n} tokens of width {width} is too large: N max(D, E) must be at most "
            f"{_DENSE} to be exact; measure_gain_estimate needs no Jacobian"
        )
    jacobian = torch.func.vmap(torch.func.jacrev(image))(tokens, flat)
    size = flat.sqrt()
    scaled = jacobian * size[:, :, None, None, None] / size[:, None, None, :, None]
    return torch.linalg.matrix_norm(scaled.flatten(3).flatten(1, 2), ord=2).reshape(batch)


def measure_gain_estimate(
    attn: Attention,
    x: Tensor,
    weights: Tensor,
    *,
    tol: float = 1e-6,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Lower estimate of `measure_gain` of one cloud by Lanczos, without a Jacobian.

    Args:
        attn: as in `measure_attention`.
        x: tokens (N, D).
        weights: (N,).
        tol: relative tolerance.
        generator: source of the starting directions.

    Returns:
        An `Estimate`; its direction is that of the tokens, times the roots of the weights.
    """
    field, x, a = _wide(attn, x, weights, single=True)
    size, log_weights = a.sqrt()[:, None], a.log()

    def image(scaled: Tensor) -> Tensor:
        tokens = scaled / size
        return size * field(tokens, tokens, log_weights)

    return estimate_lipschitz(image, x * size, tol=tol, generator=generator)


@torch.no_grad()
def split_gain(attn: Attention, x: Tensor, weights: Tensor) -> Tensor:
    r"""Local W2 gain of `measure_attention` if the mass of a token may split.

    .. math:: \max\big(\|D_a^{1/2} J D_a^{-1/2}\|,\ \max_i \|G_i\|\big), \qquad G_i = \nabla T_\mu(x_i)

    G is the derivative in the query alone, the measure being fixed (docs/theory, section 7). Two copies
    :math:`x_i \pm t e` reach :math:`\|G_i\|` (`split_attack`). For dot-product attention
    :math:`G_i = \sum_h A_h C^h_i W_h` with the covariance :math:`C^h_i` of tokens under :math:`P^h_i`
    (for one head Castin, Ablin, Peyré's :math:`\|V C_i A\|`); for L2 attention with keys
    :math:`y = x W_h` and outputs :math:`M_h` it is :math:`\sum_h 2 t_h W_h C^h_i M_h`, C of the keys.
    Exact if the images of distinct tokens are distinct, else an upper bound (mass may swap).

    Args and Returns are those of `measure_gain`.
    """
    queries = torch.linalg.matrix_norm(_query_jacobians(attn, x, weights), ord=2).amax(-1)
    return torch.maximum(measure_gain(attn, x, weights), queries)


@dataclass(frozen=True, eq=False)
class SplitAttack:
    """Half of a token's mass moved by t e, the other half by -t e.

    Attributes:
        token: which one.
        direction: e (D,), of length one.
        step: t.
        gain: ||G_i||, the ratio for t to 0.
        ratio: W2 of the images over W2 of the clouds that was reached at t: the distance of the clouds
            is at most t sqrt(a_i), and that of the images at least the root of the mean squared
            distance of the moved image's points from the nearest point of the first image.
    """

    token: int
    direction: Tensor
    step: float
    gain: float
    ratio: float


@torch.no_grad()
def split_attack(
    attn: Attention,
    x: Tensor,
    weights: Tensor,
    *,
    step: float = 1e-3,
) -> SplitAttack:
    """Splits the token with the largest :math:`||G_i||` in two and measures the ratio of W2 distances.

    Args:
        attn: as in `measure_attention`.
        x: tokens (N, D).
        weights: (N,).
        step: t, how far each half moves; :math:`t\\sqrt{a_i}` (weights summing to one) must be at least
            1e-8 of the longest token, as the ratio would be made of rounding errors below.

    Returns:
        A `SplitAttack`; its ratio is a lower bound on the W2 Lipschitz constant on any set that holds
        both clouds, up to rounding errors of some 1e-15 of the tokens over :math:`t\\sqrt{a_i}`.
    """
    field, wide, a = _wide(attn, x, weights, single=True)
    jacobians = _query_jacobians(attn, x, weights)  # (N, E, D): acts on columns
    norms = torch.linalg.matrix_norm(jacobians, ord=2)
    token = int(norms.argmax())
    least = _LEAST_MOVE * float(wide.norm(dim=-1).max() / a[token].sqrt())
    if not max(least, torch.finfo(torch.float64).tiny) <= step < math.inf:
        raise ValueError(
            f"step must be at least {least:.1e} for token {token}, 1e-8 of the longest token over the "
            f"root of its weight, else rounding decides, and finite and positive; got {step!r}"
        )
    direction = torch.linalg.svd(jacobians[token]).Vh[0]
    moved = torch.cat([wide, wide[token, None] - step * direction])
    moved[token] += step * direction
    halved = torch.cat([a, a[token, None] / 2])
    halved[token] /= 2
    before = field(wide, wide, a.log())
    after = field(moved, moved, halved.log())
    nearest = (after[:, None] - before).square().sum(-1).amin(1)
    ratio = ((halved * nearest).sum() / a[token]).sqrt() / step
    return SplitAttack(token, direction, float(step), float(norms[token]), float(ratio))


@torch.no_grad()
def _query_jacobians(attn: Attention, x: Tensor, weights: Tensor) -> Tensor:
    """The transposed G_i, (*, N, E, D), float64."""
    field, x, a = _wide(attn, x, weights)
    n, d = x.shape[-2:]

    def at(query: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
        return field(query[None], tokens, weight.log())[0]

    per_token = torch.func.vmap(torch.func.jacrev(at), in_dims=(0, None, None))
    tokens = x.reshape(-1, n, d)
    found = torch.func.vmap(per_token)(tokens, tokens, a.reshape(-1, n))
    return found.reshape(*x.shape[:-1], *found.shape[-2:])


def _field(attn: Attention, dtype: torch.dtype) -> Field:
    """T_mu with weights converted to dtype."""
    if isinstance(attn, L2MultiheadAttention):
        return _l2_field(attn, dtype)
    maps = attention_maps(attn)
    if maps.causal:
        raise ValueError(
            "a measure has no order, so that attention on it is not causal; got causal maps"
        )
    maps = maps.to(dtype)

    def field(query: Tensor, x: Tensor, log_weights: Tensor) -> Tensor:
        scores = maps.queries(query) @ x[..., None, :, :].mT + log_weights[..., None, None, :]
        out = (scores.softmax(-1) @ (x[..., None, :, :] @ maps.values)).sum(-3)
        return out if maps.constant is None else out + maps.constant

    return field


def _l2_field(layer: L2MultiheadAttention, dtype: torch.dtype) -> Field:
    if layer.causal or layer.positions is not None:
        raise ValueError(
            "a measure has no order, so that attention on it has neither mask nor positions; got "
            f"causal={layer.causal}, positions={layer.positions!r}"
        )
    heads = rearrange(layer.q_proj.weight, "(h d) i -> h i d", h=layer.num_heads).to(dtype)
    outputs, bias = layer.output_matrix().to(dtype), layer.out_proj.bias
    temperature = layer.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.to(dtype)
    root, shift = layer.root(), layer.q_proj.bias
    curb = layer.curb()

    def in_ball(tokens: Tensor) -> Tensor:
        assert curb is not None
        y = tokens[..., None, :, :] @ heads
        if shift is not None:
            y = y + shift.to(dtype).unflatten(0, (layer.num_heads, 1, -1))
        return bounded(y, (curb[..., None] * root.square()).to(dtype), layer.smooth_radius)

    def field(query: Tensor, x: Tensor, log_weights: Tensor) -> Tensor:
        if curb is None:
            # Distances are those of differences, so a common reference point keeps the squares small.
            centre = x.mean(-2, keepdim=True).detach()
            y, z = ((tokens - centre)[..., None, :, :] @ heads for tokens in (x, query))
            values = x[..., None, :, :] @ heads
        else:
            y, z = in_ball(x), in_ball(query)
            values = y
        scores = temperature * (2 * z @ y.mT - y.square().sum(-1)[..., None, :])
        weights = (scores + log_weights[..., None, None, :]).softmax(-1)
        out = (weights @ (values @ outputs)).sum(-3)
        return out if bias is None else out + bias.to(dtype)

    return field


def _wide(
    attn: Attention, x: Tensor, weights: Tensor, *, single: bool = False
) -> tuple[Field, Tensor, Tensor]:
    """The field, tokens and weights (summing to one) in float64, without gradient."""
    if single and x.ndim != 2:
        raise ValueError(f"x must be one cloud (N, D), got {tuple(x.shape)}")
    with torch.no_grad():
        a = _log_weights(attn, x, weights).softmax(-1)
        field = _field(attn, torch.float64)
    return field, x.detach().double(), a


def _log_weights(attn: Attention, x: Tensor, weights: Tensor) -> Tensor:
    """The logarithms (*, N) of the weights over the largest, in float64; ValueError for a bad cloud.

    Only ratios matter, so that they are taken before any conversion to the dtype of x.
    """
    check_tokens(x)
    check_order(attn, x)
    if weights.shape not in (x.shape[:-1], x.shape[-2:-1]):
        raise ValueError(
            f"weights must be (*, N) = {tuple(x.shape[:-1])} or (N,), got {tuple(weights.shape)}"
        )
    logs = weights.double().log()
    logs = logs - logs.amax(-1, keepdim=True)
    if not bool((logs.detach() >= _LEAST_LOG).all()):  # also for NaN
        raise ValueError(
            "weights must be positive, finite and at least 1e-300 of the largest, got "
            f"{float(weights.min())}..{float(weights.max())}"
        )
    return logs.expand(x.shape[:-1])
