"""Certified, differentiable upper bounds on the spectral norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lipformer.functional.spectral.gram_iteration import GRAM, squarings
from lipformer.functional.spectral.rounding import bound_dtype, gram_margin, rescale, restore, tall
from lipformer.functional.spectral.top_vector import (
    gram_matrix,
    lanczos_steps,
    lanczos_vector,
    top_eigenvector,
)
from lipformer.functional.spectral.with_gradient import Recipe, with_gradient
from lipformer.functional.tracing import for_onnx, tracing

_ENLARGEMENT = 2.0**-7
"""How far the verified value lies above the Lanczos value: the overshoot, 0.8%."""

_DENSE = 64
"""Up to this size the top eigenvector of the Gram matrix itself is as quick as Lanczos."""

_DENSE_ENLARGEMENT = 2.0**-24
"""6e-8, ten times the error of `top_eigenvector` in the norm at this size: half a float32 ulp."""

_SQUARINGS = 9
"""n^(1/2^10) <= 1 + _ENLARGEMENT up to n = 2000: squaring the Gram matrix so often is always enough."""

_SQUARED_ON_CPU, _SQUARED = 128, 1024
"""Up to this size squaring is quicker than Lanczos, on a CPU and on other devices."""


def _squares(n: int, device: torch.device) -> bool:
    """Whether the candidate comes from squaring: 9 products, where Lanczos is some 500 launches."""
    return n <= (_SQUARED_ON_CPU if device.type == "cpu" else _SQUARED)


def verified_square(gram: Tensor, shift: Tensor) -> Tensor:
    """Upper bound on ||A||^2 from the computed Gram matrix: shift if a factorisation confirms it.

    If the Cholesky factorisation of M = shift I - gram runs to completion, then
    lambda = ||A||^2 <= shift (1 + eta), eta = gram_margin(k, n) for k rows of A. Where it fails,
    lambda <= min(||G||_F, ||G||_inf) (1 + eta), looser and always true. Proofs: docs/theory, section 4.

    Args:
        gram: A^T A as computed, (*, n, n), float64; overwritten.
        shift: candidate for lambda, (*,), float64.

    Returns:
        (*,) float64, to be multiplied by 1 + eta: shift or the looser bound.
    """
    # In place: at this size the page faults of a fresh buffer cost more than the arithmetic.
    shifted = gram.neg_()
    diagonal = shifted.diagonal(dim1=-2, dim2=-1)
    stored = diagonal.clone()
    diagonal.add_(shift.unsqueeze(-1))
    factor, info = torch.linalg.cholesky_ex(shifted, upper=True)
    # The pivots are looked at too: not every LAPACK reports a NaN through info.
    pivots = torch.diagonal(factor, dim1=-2, dim2=-1)
    confirmed = (info == 0) & (pivots > 0).all(dim=-1)
    if not tracing() and gram.device.type == "cpu" and bool(confirmed.all()):
        return shift
    diagonal.copy_(stored)
    frobenius = torch.linalg.vector_norm(shifted, dim=(-2, -1))
    row_sum = torch.linalg.vector_norm(shifted, ord=1, dim=-1).amax(dim=-1)
    return torch.where(confirmed, shift, torch.minimum(frobenius, row_sum))


def _candidate(a: Tensor, gram: Tensor, method: str, dtype: torch.dtype) -> tuple[Tensor, float]:
    """A guess at the top right singular vector (*, n, 1) of the tall a, and the enlargement."""
    n = a.shape[-1]
    if method == "svd":
        # LAPACK raises on NaN; the answer for such weights is set at the end, from their entries.
        finite = torch.nan_to_num(a, nan=0.0, posinf=0.0, neginf=0.0)
        vectors = torch.linalg.svd(finite, full_matrices=False).Vh
        return vectors[..., :1, :].mT, gram_margin(*a.shape[-2:])
    if n <= _DENSE:
        return top_eigenvector(gram, squarings=28), _DENSE_ENLARGEMENT
    if _squares(n, a.device):
        return top_eigenvector(gram.to(dtype), _SQUARINGS).double(), _ENLARGEMENT
    return lanczos_vector(gram.to(dtype), lanczos_steps(n)).double(), _ENLARGEMENT


def _value(weight: Tensor, method: str) -> tuple[Tensor, ...]:
    """bound (*,), and for its derivatives u (*, m, 1), v (*, n, 1) and bound / (u^T W v), (*,)."""
    dtype = bound_dtype(weight)
    a, scale, top = rescale(weight)
    a = tall(a)
    k, n = a.shape[-2:]
    gram = gram_matrix(a)
    v, enlargement = _candidate(a, gram, method, dtype)
    v = torch.nn.functional.normalize(v, dim=-2)
    image = a @ v
    length = torch.linalg.vector_norm(image, dim=(-2, -1))
    square = verified_square(gram, (length * (1.0 + enlargement)).square())
    bound = square.sqrt() * (1.0 + gram_margin(k, n))
    u = torch.nn.functional.normalize(image, dim=-2)
    ratio = torch.where(length > 0, bound / length, torch.zeros_like(bound))
    left, right = (u, v) if weight.shape[-2] >= weight.shape[-1] else (v, u)
    needed = (left.to(dtype), right.to(dtype), ratio.to(dtype))
    return restore(bound, scale, top, dtype), *needed


def _gradient(weight: Tensor, u: Tensor, v: Tensor, ratio: Tensor) -> Tensor:
    """d bound / dW = (bound / sigma) u v^T, the factor held constant."""
    return (ratio[..., None, None] * u) * v.mT


def _hessian(weight: Tensor, direction: Tensor, u: Tensor, v: Tensor, ratio: Tensor) -> Tensor:
    """Second derivative of the norm along E, from the singular value decomposition in float64.

    d(u v^T) = du v^T + u dv^T, where with alpha = U^T E v, beta = V^T E^T u and sigma the largest
    singular value,
        du = U [(sigma alpha + S beta) / (sigma^2 - S^2)] + (E v - U alpha) / sigma
        dv = V [(S alpha + sigma beta) / (sigma^2 - S^2)] + (E^T u - V beta) / sigma.
    Only gaps to the top value occur, so repeated smaller singular values do no harm (the general
    derivative of an SVD divides by every gap). Where the top value itself is repeated the norm is
    not differentiable twice, and the terms without a gap are left out.
    """
    a, scale, _ = rescale(weight)
    e = direction.double() / scale[..., None, None]
    left, s, right_t = torch.linalg.svd(a, full_matrices=False)
    right = right_t.mT
    s = s.unsqueeze(-1)
    top = s[..., :1, :]
    u, v = left[..., :1], right[..., :1]
    gap = (top - s) * (top + s)
    clear = gap > max(weight.shape[-2:]) * torch.finfo(torch.float64).eps * top.square()
    inverse_gap = torch.where(clear, 1.0 / torch.where(clear, gap, 1.0), 0.0)
    inverse_top = torch.where(top > 0, 1.0 / torch.where(top > 0, top, 1.0), 0.0)
    ev, eu = e @ v, e.mT @ u
    alpha, beta = left.mT @ ev, right.mT @ eu
    du = left @ ((top * alpha + s * beta) * inverse_gap) + (ev - left @ alpha) * inverse_top
    dv = right @ ((s * alpha + top * beta) * inverse_gap) + (eu - right @ beta) * inverse_top
    product = du @ v.mT + u @ dv.mT
    return (ratio.double()[..., None, None] * product).to(bound_dtype(weight))


_RECIPES = {
    "cholesky": Recipe(partial(_value, method="cholesky"), _gradient, _hessian),
    "gram": GRAM,
    "svd": Recipe(partial(_value, method="svd"), _gradient, _hessian),
}


def _compute(weight: Tensor, method: str) -> list[Tensor]:
    return list(_RECIPES[method].value(weight))


def _empty(weight: Tensor, method: str) -> list[Tensor]:
    """What `_compute` returns, by shape alone: `_value`'s outputs or those of the Gram iteration."""
    lead, (m, n) = weight.shape[:-2], weight.shape[-2:]
    if method == "gram":
        k = min(m, n)
        powers = [weight.new_empty(*lead, k, k, dtype=torch.float64) for _ in range(squarings(k) + 1)]
        norm = weight.new_empty(lead, dtype=torch.float64)
        return [weight.new_empty(lead, dtype=bound_dtype(weight)), norm, *powers]
    shapes = (lead, (*lead, m, 1), (*lead, n, 1), lead)
    return [weight.new_empty(shape, dtype=bound_dtype(weight)) for shape in shapes]


# One opaque operator in compiled graphs: the some 400 small operations of a Lanczos run would take
# the compiler a minute per weight and gain nothing.
_compiled = torch.library.custom_op(
    "lipformer::spectral_norm_bound",
    _compute,
    mutates_args=(),
    schema="(Tensor weight, str method) -> Tensor[]",
)
_compiled.register_fake(_empty)


@_compiled.register_vmap
def _compiled_vmap(info: object, in_dims: tuple[int, None], weight: Tensor, method: str) -> Any:
    outputs = _compiled(weight.movedim(in_dims[0], 0), method)
    return outputs, [0] * len(outputs)


def spectral_norm_bound(weight: Tensor, *, method: str = "cholesky") -> Tensor:
    """Upper bound on the spectral norm: ||W|| <= bound, never below (docs/theory, section 4).

    Holds for the stored entries of W taken as exact real numbers. All arithmetic that carries the
    proof is in float64, which autocast leaves alone, with rounding margins. There is no state and
    no randomness: one weight has one bound, in training and in evaluation.

    * "cholesky": the value ||W v|| at a vector v, by Lanczos or, where that is quicker, by squaring
      W^T W, enlarged by 0.8% (by 6e-8 if min(m, n) is at most 64, where v is exact) and confirmed by
      a float64 Cholesky factorisation of mu^2 I - W^T W; where it is not confirmed,
      sqrt(min(||G||_F, ||G||_inf)) with G = W^T W.
    * "gram": ||(W^T W)^(2^k)||_F^(1/2^(k+1)) with k chosen for at most 1% overshoot.
    * "svd": the largest singular value, enlarged by some 1e-9 and confirmed in the same way.

    The gradient of "cholesky" and "svd" is (bound / ||W v||) u v^T, u = W v / ||W v||, with the
    factor held constant. It is exact where v is a singular vector and the bound was confirmed; for
    a Lanczos vector u v^T is a subgradient of the norm up to the Lanczos error. Second derivatives
    are those of the exact norm (one float64 SVD each). Derivatives of "gram" are exact for the
    function above. Works under torch.func, torch.compile and torch.export (in compiled graphs
    first derivatives only).

    Args:
        weight: W, (*, m, n), floating point.
        method: "cholesky", "gram" or "svd".

    Returns:
        (*,), in W's dtype but at least float32, rounded up. Not finite if W is not. An empty matrix
        has bound 0.

    Raises:
        ValueError: weight is no matrix of real floating-point numbers, the method is unknown, or it is
            called by torch.onnx.export.

    Example:
        >>> w = torch.tensor([[3.0, 0.0], [0.0, -4.0]])
        >>> bound = spectral_norm_bound(w)
        >>> 4.0 <= bound.item() <= 4.000001
        True
    """
    if weight.dim() < 2 or not weight.is_floating_point():
        raise ValueError(
            f"weight must be floating point (*, m, n), got {weight.dtype} {tuple(weight.shape)}"
        )
    if method not in _RECIPES:
        raise ValueError(f"method must be one of {sorted(_RECIPES)}, got {method!r}")
    if tracing() and for_onnx():
        raise ValueError(
            "bounds of spectral norms have no form in ONNX: lf.bake first, which puts plain weights in "
            "the place of those that are computed from a bound, and export what it returns"
        )
    if 0 in weight.shape[-2:]:
        return weight.sum(dim=(-2, -1), dtype=bound_dtype(weight))
    return with_gradient(_RECIPES[method], weight, partial(_compiled, method=method))


def norm_bound(matrix: Tensor) -> Tensor:
    """Upper bound on the spectral norm, (*, m, n) -> (*,) in float64, 1e-9 above it.

    As :func:`spectral_norm_bound`, confirmed by the same factorisation, but the
    value to confirm comes from an eigensolver: without gradients it is quicker for many matrices.
    """
    a, scale, top = rescale(matrix)
    a = tall(torch.nan_to_num(a, nan=0.0, posinf=0.0, neginf=0.0))
    k, n = a.shape[-2:]
    gram = gram_matrix(a)
    margin = gram_margin(k, n)
    guess = torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0.0) * (1.0 + margin)
    bound = verified_square(gram, guess + torch.finfo(torch.float64).tiny).sqrt() * (1.0 + margin)
    return restore(bound, scale, top, torch.float64)


_LARGEST_STACK = 2**26
"""Entries of a stack: half a gigabyte in float64."""


def spectral_norm_bounds(weights: Sequence[Tensor]) -> list[Tensor]:
    """:func:`spectral_norm_bound` of several weights, in one call for all of one shape.

    A transpose has the same norm, so (m, n) and (n, m) are one shape. On a CPU, where a call costs
    little and a copy much, only small matrices are stacked.

    Args:
        weights: tensors (*, m, n) of any shapes.

    Returns:
        The bounds (*,) of each in float64.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    found: dict[int, Tensor] = {}
    for i, weight in enumerate(weights):
        m, n = weight.shape[-2:]
        if weight.numel() == 0:
            found[i] = spectral_norm_bound(weight).double()
            continue
        alone = weight.device.type == "cpu" and not _squares(min(m, n), weight.device)
        shape = (max(m, n), min(m, n), weight.dtype, weight.device)
        groups.setdefault((*shape, i) if alone else shape, []).append(i)
    for group in groups.values():
        stacks = {i: tall(weights[i]).reshape(-1, *tall(weights[i]).shape[-2:]) for i in group}
        most = max(1, _LARGEST_STACK // math.prod(stacks[group[0]].shape[-2:]))
        stack = torch.cat(list(stacks.values())) if len(group) > 1 else stacks[group[0]]
        pieces = [spectral_norm_bound(piece).double() for piece in stack.split(most)]
        bounds = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        for i, bound in zip(group, bounds.split([len(s) for s in stacks.values()]), strict=True):
            found[i] = bound.reshape(weights[i].shape[:-2])
    return [found[i] for i in range(len(weights))]
