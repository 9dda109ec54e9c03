r"""Differences path by path: skip connections and linear maps multiplied out (docs/theory, section 4).

Behind a part of a network the difference of two runs is :math:`\sum_i R_i v_i`, with a known matrix
:math:`R_i` of features for each :math:`v_i`, whose size is bounded: the difference of the inputs, and
what came out of each nonlinear map. Linear maps multiply the matrices, a residual adds what its branch
makes of the sum, and a map of which only a constant is known sees :math:`\sum_i \|R_i\| |v_i|` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lipformer.functional.rounding import FLOOR, ROUND_UP, UNIT, enlarge
from lipformer.functional.spectral.bound import norm_bound
from lipformer.functional.spectral.rounding import frobenius_norm

_MOST = 32
"""Paths that are followed; a network of more residuals has them added up first."""


@dataclass(frozen=True)
class Path:
    r""":math:`R v` with :math:`|v|` at most ``size``, everything in float64 without gradients.

    Attributes:
        size: (B,) for B samples, or a scalar.
        matrix: R as computed, (B or 1, K, m, n), with K = 2 that of padded tokens beside that of the
            others; None for the identity.
        error: how far R as computed may be off in the Frobenius norm, (B or 1,).
        known: a bound of :math:`\|R\|` (B or 1,), if there is one already.
    """

    size: Tensor
    matrix: Tensor | None = None
    error: Tensor | float = 0.0
    known: Tensor | float | None = 1.0

    @cached_property
    def norm(self) -> Tensor | float:
        """The norm of R from above."""
        if self.known is not None:
            return self.known
        assert self.matrix is not None
        if not self.matrix.numel():
            return 0.0
        return (norm_bound(self.matrix).amax(-1) + self.error) * ROUND_UP


Paths = tuple[Path, ...]
Passage = Callable[[Paths], Paths]
"""What a module makes of the paths to its input."""


def total(paths: Paths) -> Tensor:
    r""":math:`\sum_i \|R_i\| |v_i|`, rounded up: a bound of the difference, (B,)."""
    added = torch.zeros_like(paths[0].size)
    for path in paths:
        added = added + path.norm * path.size
    added = enlarge(added, len(paths)).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return added.clamp_min(FLOOR)  # of next to nothing a later factor may still make much


def behind(size: Tensor) -> Paths:
    """The paths behind a map of which only the size of the outcome is known, (B,)."""
    return (Path(size),)


def unchanged(paths: Paths) -> Paths:
    """The paths behind the identity."""
    return paths


def through(paths: Paths, matrix: Tensor, known: Tensor | float, error: Tensor | float = 0.0) -> Paths:
    r"""The paths behind a linear map of features.

    A product as computed is off by at most :math:`2 (k + 8) u \|W\|_F \|R\|_F` for sums of k terms; what
    R is off by goes through W, :math:`\|W E\|_F \le \|W\| \|E\|_F`, and R through what W is off by.

    Args:
        paths: to its input.
        matrix: W, (*, m, k), the leading dimensions as in :class:`Path`.
        known: a bound of its norm, errors included, a number or (B or 1,).
        error: how far W may be off in the Frobenius norm.
    """
    matrix = matrix.detach().double()
    matrix = matrix[(None,) * (4 - matrix.ndim)]
    own = frobenius_norm(matrix).amax(-1)
    found = []
    for path in paths:
        if path.matrix is None:
            found.append(_narrow(Path(path.size, matrix, torch.as_tensor(error), known)))
            continue
        size = frobenius_norm(path.matrix).amax(-1)
        rounded = 2.0 * (matrix.shape[-1] + 8) * UNIT * own * size
        off = enlarge(known * path.error + error * size + rounded) + FLOOR
        found.append(_narrow(Path(path.size, matrix @ path.matrix, off, None)))
    return tuple(found)


def _narrow(path: Path) -> Path:
    r"""The same with no more columns than rows: :math:`R = U^\top Q^\top` has the path
    :math:`U^\top (Q^\top v)`, and :math:`|Q^\top v| \le |v|`.

    The factor U of Householder's method belongs to an exactly orthogonal Q and a matrix that is off by
    at most a small multiple of :math:`m n u \|R\|_F` (Higham 2002, theorem 19.4).
    """
    assert path.matrix is not None
    rows, columns = path.matrix.shape[-2:]
    if columns <= rows or not bool(torch.isfinite(path.matrix).all()):
        return path
    size = frobenius_norm(path.matrix).amax(-1)
    off = enlarge(path.error + 32.0 * rows * columns * UNIT * size) + FLOOR
    narrow = torch.linalg.qr(path.matrix.mT, mode="r").R.mT
    return Path(path.size, narrow, off, path.known)


def scaled(paths: Paths, factor: Tensor | float) -> Paths:
    """The paths behind a multiplication by a number of at most this size, rounded up."""
    return tuple(
        # Above FLOOR: a matrix may enlarge what two small factors would have taken out of range.
        replace(path, size=(path.size * factor * ROUND_UP).clamp_min(FLOOR))
        for path in paths
    )


def then_scaled(passage: Passage | None, factor: Tensor | float) -> Passage | None:
    """A passage, if there is one, and a multiplication by a number of at most this size."""
    return None if passage is None else lambda paths: scaled(passage(paths), factor)


def beside(paths: Paths, branch: Passage) -> Paths:
    """The paths behind x + f(x): those to x, and those that f makes of them."""
    if len(paths) > _MOST:
        paths = behind(total(paths))
    return paths + branch(paths)


def in_turn(passages: list[Passage]) -> Passage:
    """One passage after another."""

    def passage(paths: Paths) -> Paths:
        for step in passages:
            paths = step(paths)
        return paths

    return passage
