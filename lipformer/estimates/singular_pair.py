"""The largest singular value of a linear map that is known through products only."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lipformer.estimates.jacobian_products import require_finite

_BASIS = 32  # vectors kept before the search space is compressed
_KEPT = 8  # Ritz vectors that survive the compression


class SingularPair(NamedTuple):
    """A unit right vector v (K,), products used, and whether the residual met the tolerance."""

    vector: Tensor
    iterations: int
    converged: bool


def top_singular_pair(
    matvec: Callable[[Tensor], Tensor],
    rmatvec: Callable[[Tensor], Tensor],
    starts: Tensor,
    *,
    tol: float,
    max_iter: int,
) -> SingularPair:
    r"""Lanczos on J^T J with full reorthogonalisation and thick restarts (Rayleigh-Ritz form).

    The search space V (orthonormal) is extended by the residual r = J^T J v - theta v of its
    best Ritz vector v, theta = |J v|^2: from one start that is the Krylov space of J^T J, so
    this is Lanczos, written so that several starts and a bounded memory come for free.
    J^T J has an eigenvalue within |r| of theta, hence J a singular value within about
    |r| / (2 theta) of |J v|, relatively; the search stops at |r| <= 2 tol theta.

    Args:
        matvec: v (K,) -> J v (M,).
        rmatvec: u (M,) -> J^T u (K,).
        starts: (R, K), directions that span the first search space.
        tol: Relative tolerance of the singular value.
        max_iter: Largest number of extensions after the starts.

    Returns:
        The best right vector; |J v| is a lower estimate of the largest singular value.
    """
    basis: list[Tensor] = []
    images: list[Tensor] = []
    for start in starts:
        _extend(basis, images, start, matvec)
    theta, v, image = _ritz(basis, images)
    iterations, converged = len(basis), False
    for _ in range(max_iter):
        residual = rmatvec(image) - theta * v
        size = float(torch.linalg.vector_norm(residual))
        converged = size <= 2 * tol * theta
        if converged or not math.isfinite(size):
            break
        if len(basis) >= _BASIS:
            basis, images = _compress(basis, images)
        if not _extend(basis, images, residual, matvec):
            converged = True  # nothing new within rounding: the space is invariant
            break
        iterations += 1
        theta, v, image = _ritz(basis, images)
    return SingularPair(v, iterations, converged)


def _extend(
    basis: list[Tensor], images: list[Tensor], vector: Tensor, matvec: Callable[[Tensor], Tensor]
) -> bool:
    """Add the part of `vector` orthogonal to the basis; False where nothing is left of it."""
    for _ in range(3):  # each pass repairs what rounding left of the one before
        vector = vector / torch.linalg.vector_norm(vector)
        if basis:
            v = torch.stack(basis)
            vector = vector - v.T @ (v @ vector)
    left = float(torch.linalg.vector_norm(vector))
    if not left > 0.5:  # also for NaN (a zero vector)
        return not basis and _extend(basis, images, torch.ones_like(vector), matvec)
    basis.append(vector / left)
    images.append(matvec(basis[-1]))
    return True


def _projected(images: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The images stacked, and the eigenvalues and eigenvectors of V^T J^T J V, ascending."""
    w = torch.stack(images)
    gram = (w @ w.T).cpu().double()
    require_finite(gram, "the Jacobian of fn at x")
    values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    return w, values, vectors.to(w)


def _ritz(basis: list[Tensor], images: list[Tensor]) -> tuple[float, Tensor, Tensor]:
    w, values, vectors = _projected(images)
    top = vectors[:, -1]
    return max(float(values[-1]), 0.0), torch.stack(basis).T @ top, w.T @ top


def _compress(basis: list[Tensor], images: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Replace the basis by its best Ritz vectors, whose images follow without new products."""
    w, _, vectors = _projected(images)
    kept = vectors[:, -_KEPT:].T
    return list(kept @ torch.stack(basis)), list(kept @ w)
