"""Matrices with all singular values drawn to one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lipformer.functional.spectral.rounding import tall

STEPS = 6
"""Of :math:`X_0` below, singular values of 0.05, 0.1 and 0.3 become 0.52, 0.85 and 1.00."""


def orthogonalised(weight: Tensor, steps: int = STEPS) -> Tensor:
    r"""A matrix of the same singular vectors, its singular values drawn together near one.

    With the small side's Gram matrix :math:`G_0 = c^2 W W^\top`, :math:`c^{-8} = \sum_i \sigma_i^8`, so
    that all singular values of :math:`X_0 = c W` are at most 1,

    .. math:: X_{k+1} = S_k X_k, \quad S_k = \tfrac32 I - \tfrac12 G_k, \quad G_{k+1} = S_k G_k S_k,

    maps each of them by :math:`s \mapsto \tfrac32 s - \tfrac12 s^3`, which has the fixed point 1 (Björck
    and Bowie 1971). Only the first and the last product have the size of W. Exact arithmetic would keep
    them at most 1; what carries a certificate is the bound of the result, not this.

    Args:
        weight: W, (*, m, n).
        steps: k >= 1.

    Returns:
        (*, m, n) in the weight's dtype; computed in at least float32, autocast or not.
    """
    if 0 in weight.shape[-2:]:
        return weight
    with torch.autocast(weight.device.type, enabled=False):
        full = weight.to(torch.promote_types(weight.dtype, torch.float32))
        # Eighth powers of singular values must have a place in the dtype.
        full = full / _positive(full.detach().abs().amax((-2, -1), keepdim=True))
        wide = tall(full).mT
        gram = wide @ wide.mT
        # sum_i sigma_i^8 is the squared Frobenius norm of the Gram matrix's square.
        square = torch.linalg.vector_norm(gram @ gram, dim=(-2, -1), keepdim=True)
        scale = _positive(square).rsqrt()
        gram = scale * gram
        offset = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).mul_(1.5)
        product = step = torch.sub(offset, gram, alpha=0.5)
        for _ in range(steps - 1):
            gram = step @ gram @ step
            step = torch.sub(offset, gram, alpha=0.5)
            product = step @ product
        found = scale.sqrt() * (product @ wide)
        return tall(found.mT, full).to(weight.dtype)


def orthogonalised_all(weights: Sequence[Tensor]) -> list[Tensor]:
    """:func:`orthogonalised` of several matrices (m, n), in one call for all of one shape.

    A transpose is of the same shape: its result is the transpose of the other's. On a CPU, where calls
    cost little, each by itself: equal to the last digit to what it is alone.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, weight in enumerate(weights):
        if weight.device.type == "cpu":
            groups[(i,)] = [i]
            continue
        m, n = weight.shape
        groups.setdefault((max(m, n), min(m, n), weight.dtype, weight.device), []).append(i)
    found: dict[int, Tensor] = {}
    for group in groups.values():
        if len(group) == 1:
            found[group[0]] = orthogonalised(weights[group[0]])
            continue
        stack = torch.stack([tall(weights[i]) for i in group])
        for i, drawn in zip(group, orthogonalised(stack).unbind(), strict=True):
            found[i] = tall(drawn, weights[i])
    return [found[i] for i in range(len(weights))]


def _positive(size: Tensor) -> Tensor:
    """A zero matrix has nothing to divide by."""
    return torch.where(size > 0.0, size, 1.0)
