"""A cheap guess at the top right singular vector: Lanczos on the Gram matrix, or squaring it.

Nothing here is certified. The vector only proposes a value, which `verified_square` then verifies; a bad
proposal costs tightness and never soundness.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from lipformer.functional.tracing import has_autocast


def gram_matrix(a: Tensor) -> Tensor:
    """a^T a, of which only the blocks on and below the diagonal are multiplied out.

    Four strips cost 5/8 of the full product. Every entry is a dot product of two columns of a
    (BLAS has no Strassen-like products), so |computed - a^T a| <= gamma_k |a|^T |a| holds entry by
    entry, whatever the order of summation (Higham, Accuracy and Stability, section 3.5).

    Args:
        a: (*, k, n).

    Returns:
        (*, n, n), symmetric up to the rounding inside the diagonal blocks.
    """
    n = a.shape[-1]
    width = max(64, -(-n // 4))
    if n <= width:
        return a.mT @ a
    gram = a.new_empty(*a.shape[:-2], n, n)
    for start in range(0, n, width):
        stop = min(start + width, n)
        strip = a[..., start:stop].mT @ a[..., :stop]
        gram[..., start:stop, :stop] = strip
        gram[..., :start, start:stop] = strip[..., :start].mT
    return gram


def lanczos_steps(n: int) -> int:
    """Lanczos steps for an n x n Gram matrix: 28 at n = 65, 40 at 512, 44 at 1024.

    With a random start, the Ritz value of this many steps misses the square of the norm by less
    than the enlargement of the candidate on every spectrum we could construct (outliers of all sizes
    above flat, square-root and arcsine bulks); the steps needed grow with log n.
    """
    return 4 * n.bit_length()


def start_vector(n: int, like: Tensor) -> Tensor:
    """The fixed unit start vector (n, 1), in the dtype and on the device of `like`.

    Entries are 3/2 - 2 frac(i^2 phi), uniform on [-1/2, 3/2] and without correlation between
    neighbours, so that neither a constant nor an alternating singular vector is orthogonal to it.
    It comes from a formula and not from a random generator: the same weight has the same bound in
    every call, process and mode, and no generator is advanced.
    """
    i = torch.arange(1, n + 1, dtype=torch.float64, device=like.device)
    q = 1.5 - 2.0 * torch.frac(i * i * 0.6180339887498949)
    return (q / torch.linalg.vector_norm(q)).to(like.dtype).unsqueeze(-1)


def top_eigenvector(matrix: Tensor, squarings: int) -> Tensor:
    """Eigenvector of the largest eigenvalue of a positive semidefinite matrix, by squaring.

    The column v of matrix^p, p = 2^squarings, that has the largest diagonal entry. Its Rayleigh
    quotient is at least n^(-1/p) of the largest eigenvalue lambda: with the moments
    m_q = e^T matrix^q e of that coordinate vector e, the quotient is m_(2p+1) / m_(2p) >=
    m_p^(1/p), since ratios of successive moments grow and m_0 = 1, and m_p >= trace / n >=
    lambda^p / n. Unlike an eigensolver it can neither fail to converge, as LAPACK does in float32
    on the Lanczos matrix of a rank-one weight, nor does it synchronise a GPU.

    Args:
        matrix: (*, n, n), symmetric; n of at most about 100 in float64 and 1000 in float32, or the
            squarings between two rescalings would leave the range.
        squarings: 28 leaves a relative log(n) / p ~ 1e-8, 9 leaves 1.2% of the eigenvalue.

    Returns:
        (*, n, 1) in the matrix's dtype, not normalised; zero where matrix is zero.
    """
    # Entries fall to n^(-2^(unscaled-1)), and the next norm squares them.
    unscaled = 4 if matrix.dtype == torch.float64 else 3
    tiny = torch.finfo(matrix.dtype).tiny
    power = matrix.reshape(-1, *matrix.shape[-2:])
    with no_autocast(matrix.device):
        for step in range(squarings):
            if step % unscaled == 0:
                norm = torch.linalg.vector_norm(power, dim=(-2, -1), keepdim=True)
                power = power / norm.clamp_min(tiny)
            power = torch.bmm(power, power)
    longest = torch.diagonal(power, dim1=-2, dim2=-1).argmax(dim=-1)
    column = torch.take_along_dim(power, longest[..., None, None], dim=-1)
    return column.reshape(*matrix.shape[:-1], 1)


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    if not has_autocast(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def lanczos_vector(gram: Tensor, steps: int) -> Tensor:
    """Ritz vector of the largest eigenvalue of gram after a fixed number of Lanczos steps.

    Each new vector is orthogonalised twice against all earlier ones: with one pass a narrow
    spectrum (a nearly orthogonal weight) destroys the basis within some ten steps.

    Args:
        gram: (*, n, n), symmetric.
        steps: dimension of the Krylov space.

    Returns:
        (*, n, 1), not normalised; zero where gram is zero.
    """
    batch, n = gram.shape[:-2], gram.shape[-1]
    if batch and gram.numel() and gram.device.type == "cpu":
        # A batched matrix-vector product is some ten times slower than single ones on CPU.
        vectors = [lanczos_vector(g, steps) for g in gram.flatten(0, -3).unbind(0)]
        return torch.stack(vectors).reshape(*batch, n, 1)
    basis = gram.new_zeros(*batch, steps, n)
    transposed = basis.mT
    # What remains of a vector below this level is rounding noise. Dividing by the level shrinks the
    # noise instead of blowing it up to a unit vector that lies in the span of the earlier ones.
    noise = 16 * torch.finfo(gram.dtype).eps * torch.linalg.vector_norm(gram, dim=(-2, -1))
    noise = noise.clamp_min(torch.finfo(gram.dtype).tiny)[..., None, None]
    q = start_vector(n, gram).expand(*batch, n, 1)
    columns = []
    with no_autocast(gram.device):
        for j in range(steps):
            transposed[..., j : j + 1] = q
            w = gram @ q
            column = basis @ w
            w -= transposed @ column
            w -= transposed @ (basis @ w)
            columns.append(column)
            q = w / torch.maximum(torch.linalg.vector_norm(w, dim=-2, keepdim=True), noise)
        # The rows of the basis are filled in turn: the columns hold the upper triangle of T alone.
        upper = torch.triu(torch.cat(columns, dim=-1).double())
        top = top_eigenvector(upper + torch.triu(upper, 1).mT, squarings=28)
        return transposed @ torch.nn.functional.normalize(top, dim=-2).to(gram.dtype)
