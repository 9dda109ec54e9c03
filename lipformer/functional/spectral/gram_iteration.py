"""Gram iteration: an upper bound on the spectral norm that converges from above.

||W|| <= f(W) = ||(W^T W)^(2^k)||_F^(1/2^(k+1)), which is the Schatten norm of W with exponent
p = 2^(k+2): f = (sum_i sigma_i^p)^(1/p) (docs/theory, section 4).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipformer.functional.spectral.rounding import bound_dtype, gram_margin, rescale, restore, tall
from lipformer.functional.spectral.top_vector import gram_matrix
from lipformer.functional.spectral.with_gradient import Recipe

_TINY = torch.finfo(torch.float64).tiny


def squarings(n: int) -> int:
    """Smallest k with n^(1/2^(k+2)) <= 1.01, the overshoot of f on an orthogonal n x n matrix."""
    return math.ceil(math.log2(math.log(max(n, 2)) / math.log(1.01))) - 2


def schatten_norm(a: Tensor) -> tuple[Tensor, ...]:
    """f(a), and the normalised powers Y_j = (a^T a)^(2^j) / ||(a^T a)^(2^j)||_F, j = 0..k.

    With X_0 = a^T a, s_j = ||X_j||_F, Y_j = X_j / s_j, X_(j+1) = Y_j^T Y_j nothing overflows, and
    f^2 = s_0 sqrt(s_1 sqrt(s_2 ...)).

    Rounding: f (1 + eta) is a true bound, eta = gram_margin(K, n). Each computed X_(j+1) is within
    gamma_n ||Y_j||_F^2 <= n gamma_n ||Y_j||^2 of the exact product, which costs
    ||Y_j||^2 <= ||X_(j+1)|| / (1 - n gamma_n); the division by s_j, whatever the error of s_j,
    ||X_j|| <= s_j ||Y_j|| (1 + 2 u sqrt n); X_0 costs 1 / (1 - n gamma_K) as the others; the last
    norm, a sum of n^2 squares, costs 1 + n^2 u; the products and roots cost 8 u. The exponents
    1, 1/2, 1/4, ... add up to less than 2, so f^2 is off by a relative 4 n (K + n + 8) u = eta / 4
    at most.

    Args:
        a: (*, K, n) in float64 with K >= n, scaled so that its largest entry is near 1.

    Returns:
        f of shape (*,), followed by Y_0, ..., Y_k of shape (*, n, n).
    """
    x = gram_matrix(a)
    norms, powers = [], []
    last = squarings(a.shape[-1])
    for j in range(last + 1):
        norms.append(torch.linalg.vector_norm(x, dim=(-2, -1)).clamp_min(_TINY))
        powers.append(x / norms[j][..., None, None])
        if j < last:
            x = gram_matrix(powers[j])
    square = norms[last]
    for s in reversed(norms[:last]):
        square = s * torch.sqrt(square)
    return torch.sqrt(square), *powers


def schatten_gradient(a: Tensor, norm: Tensor, *powers: Tensor) -> Tensor:
    """Gradient of f at a in closed form: f D / <D, a> with D = a Y_0 Y_1 ... Y_k.

    The gradient is U (S/f)^(p-1) V^T, proportional to a (a^T a)^(p/2 - 1), where
    p/2 - 1 = 2^(k+1) - 1 = 1 + 2 + ... + 2^k. Its inner product with a is f, because f is
    homogeneous (Euler), and that fixes the factor without a power that could underflow.

    Args:
        a: (*, K, n).
        norm: f(a), (*,).
        powers: Y_0 ... Y_k, each (*, n, n).

    Returns:
        (*, K, n), zero where a is zero.
    """
    direction = a
    for y in powers:
        direction = direction @ y
    inner = (direction * a).sum(dim=(-2, -1)).clamp_min(_TINY)
    return (norm / inner)[..., None, None] * direction


def _value(weight: Tensor) -> tuple[Tensor, ...]:
    a, scale, top = rescale(weight)
    a = tall(a)
    norm, *powers = schatten_norm(a)
    enlarged = norm * (1.0 + gram_margin(*a.shape[-2:]))
    return restore(enlarged, scale, top, bound_dtype(weight)), norm, *powers


def _gradient(weight: Tensor, norm: Tensor, *powers: Tensor) -> Tensor:
    gradient = schatten_gradient(tall(rescale(weight)[0]), norm, *powers)
    return tall(gradient, like=weight).to(bound_dtype(weight))


def _hessian(weight: Tensor, direction: Tensor, *_: Tensor) -> Tensor:
    """Plain differentiation of the closed form, so that derivatives of every order are right."""
    a, scale, _top = rescale(weight)

    def gradient(x: Tensor) -> Tensor:
        return schatten_gradient(x, *schatten_norm(x))

    along = tall(direction.double() / scale[..., None, None])
    product = torch.func.vjp(gradient, tall(a))[1](along)[0]
    return tall(product, like=weight).to(bound_dtype(weight))


GRAM = Recipe(_value, _gradient, _hessian)
"""The bound f(W), rounded up: at most 1% above the norm, which an orthogonal matrix reaches."""
