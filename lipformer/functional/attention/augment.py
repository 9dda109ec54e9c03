r"""L2 attention as dot-product attention on augmented tokens.

With :math:`z_i = \sqrt{2t}\,(y_i - c)` the logits :math:`-t\|y_i-y_j\|^2` equal, up to a term that is
constant in each row,

.. math:: z_i \cdot z_j - \tfrac12\|z_j\|^2 = \langle [z_i, 1], [z_j, -\tfrac12\|z_j\|^2] \rangle

so one more column turns dot-product attention into L2 attention. Keys and values are one tensor; the
columns added to it are dropped from the output. Causal ALiBi, padding and the row sums that dropout
needs are columns too, so that no N x N tensor is made and fused kernels accept the call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# The logit of a padded key lies this much below the logit of any query's own key: exp of it is zero
# in every dtype, and the number itself is finite in every dtype, so gradients stay finite too.
PADDED = 1e4


@dataclass(frozen=True)
class Augmented:
    """Query and key-value tensors (*, H, N, E), E a multiple of 8, and where the tokens stand.

    Attributes:
        query: the augmented queries.
        key: the augmented keys, which are the values too.
        start: first column of the tokens.
        width: number of columns of the tokens.
        norm: the key column that holds the norms (their leading parts).
        hidden: the entry of that column that hides a key.
        ones: column of ones among the keys (its output is the row sum of the weights), or None.
    """

    query: Tensor
    key: Tensor
    start: int
    width: int
    norm: int
    hidden: float
    ones: int | None


def split_in_units(x: Tensor, dtype: torch.dtype, units: tuple[float, ...]) -> list[Tensor]:
    """``x`` as a sum of units times tensors of ``dtype``; the gradient flows through the last, 1."""
    pieces = []
    for unit in units[:-1]:
        piece = (x.detach() / unit if unit != 1.0 else x.detach()).to(dtype)
        pieces.append(piece)
        x = torch.sub(x, piece.to(x.dtype), alpha=unit)
    return [*pieces, x.to(dtype)]


def norm_units(dtype: torch.dtype) -> tuple[float, ...]:
    """Units of the norm columns: more than one in half precision, and float16 ends at 65504.

    The last is 1: it multiplies the gradient, which float16 holds only up to the same end.
    """
    if dtype == torch.float16:
        return (32768.0, 16.0, 1.0)
    return (1.0, 1.0) if dtype == torch.bfloat16 else (1.0,)


def alibi_columns(slopes: Tensor, n: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    r"""Columns whose product is :math:`-s_h (i - j)` for query i and key j (H, N, 1).

    Half precision cannot hold a position, so it is split in three; the row constant :math:`-s_h i`
    is left out there. Otherwise it is kept, with the rounding residue of each product, so that near
    keys have small logits at any position.
    """
    place = torch.arange(n, device=slopes.device, dtype=torch.float64)
    product = (slopes.double()[:, None] * place).unsqueeze(-1)
    one = torch.ones((), device=slopes.device, dtype=dtype)
    if dtype in (torch.bfloat16, torch.float16):
        return [one] * 3, split_in_units(product, dtype, (1.0, 1.0, 1.0))
    high, low = split_in_units(product, dtype, (1.0, 1.0))
    minus = -one
    return [one, high, one, low], [high, minus, low, minus]


def augment(
    z: Tensor, padding: Tensor | None, slopes: Tensor | None, *, row_sums: bool = False
) -> Augmented:
    """Builds the augmented queries and keys.

    Args:
        z: scaled, centred tokens (*, H, N, d), zero at padded tokens, in the dtype of the kernel.
        padding: (*, N) bool, True at padded tokens, or None.
        slopes: ALiBi slopes (H,) or None.
        row_sums: add a column of ones to the keys.
    """
    units = norm_units(z.dtype)
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    norm = -0.5 * wide.square().sum(-1, keepdim=True)
    if padding is not None:
        norm = norm.masked_fill(padding[..., None, :, None], -PADDED)
    norms = split_in_units(norm, z.dtype, units)

    # Positions come first: kernels add products in order, so the two large terms cancel exactly
    # before anything is added to them.
    queries, keys = ([], []) if slopes is None else alibi_columns(slopes, z.shape[-2], z.dtype)
    start = len(keys)
    one = z.new_ones(())
    queries = [*queries, z] + [one if unit == 1.0 else one * unit for unit in units]
    keys = [*keys, z, *norms]
    width = start + z.shape[-1] + len(norms)
    ones = None
    if row_sums:
        ones = width
        width += 1
        queries.append(z.new_zeros(()))
        keys.append(one)
    filler = -width % 8
    return Augmented(
        query=_join(queries, z, filler),
        key=_join(keys, z, filler),
        start=start,
        width=z.shape[-1],
        norm=start + z.shape[-1],
        hidden=-PADDED / units[0],
        ones=ones,
    )


def _join(columns: list[Tensor], z: Tensor, filler: int) -> Tensor:
    """Concatenates columns of shapes that broadcast to (*, H, N, w), and ``filler`` zero columns."""
    shape = z.shape[:-1]
    wide = [c if c is z else c.expand(*shape, 1) for c in columns]
    if filler:
        wide.append(z.new_zeros(()).expand(*shape, filler))
    return torch.cat(wide, dim=-1)
