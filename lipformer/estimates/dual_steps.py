r"""The two half steps of the power method for operator norms that are not Euclidean.

Each norm here is "the largest Euclidean norm of a group of coordinates":

    l2     one group, the whole tensor
    token  a group for each token, that is, for each index of all dimensions but the last
    linf   a group for each coordinate
    self   the groups of "token", input and output both restricted to one token

so one pair of formulas serves all of them. For J from input groups j to output groups i the
gain is max_i sup_{|a|=1} sum_j |J_ij^T a|, and the method alternates (Boyd 1974; Higham 1992)

    y = J e     i = argmax |y_i|,  a = y_i / |y_i|,  u = a in group i, 0 elsewhere
    g = J^T u   e_j = g_j / |g_j|

which never lowers |y_i|. For l2 it is the power method on J^T J. It climbs to a local maximum,
so it gives a lower estimate of the gain.
"""

from __future__ import annotations

import torch
from torch import Tensor


def groups(t: Tensor, norm: str) -> Tensor:
    """A view of a stack (R, *shape) as (R, number of groups, size of a group)."""
    if norm == "l2":
        return t.reshape(t.shape[0], 1, -1)
    if norm == "linf":
        return t.reshape(t.shape[0], -1, 1)
    return t.reshape(t.shape[0], -1, t.shape[-1])


def group_norms(t: Tensor, norm: str) -> Tensor:
    """(R, *shape) -> (R, number of groups): the Euclidean norm of each group."""
    return torch.linalg.vector_norm(groups(t, norm), dim=-1)


def one_group(t: Tensor, norm: str, index: Tensor) -> Tensor:
    """`t` (R, *shape) with every group but number index[r] set to zero."""
    grouped = groups(t, norm)
    keep = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=t.device)
    keep.scatter_(1, index[:, None], True)
    return torch.where(keep[..., None], grouped, torch.zeros_like(grouped)).reshape(t.shape)


def output_step(y: Tensor, norm: str, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """From y = J e to the gain along e and the unit cotangent u that attains it.

    Args:
        y: (R, *shape).
        norm: One of `NORMS`.
        index: (R,), the output group to look at; None takes the largest. "self" needs it.

    Returns:
        The gains (R,), and u (R, *shape) with <u, y> = gain.
    """
    sizes = group_norms(y, norm)
    if index is None:
        index = sizes.argmax(dim=-1)
    gain = sizes.gather(1, index[:, None]).squeeze(1)
    chosen = one_group(y, norm, index)
    return gain, chosen / _safe(gain).reshape(-1, *[1] * (y.ndim - 1))


def input_step(g: Tensor, norm: str, index: Tensor | None = None) -> Tensor:
    """From g = J^T u to the direction e of norm one that maximises <u, J e>.

    Args:
        g: (R, *shape).
        norm: One of `NORMS`.
        index: (R,), the one input group that may move, for "self".
    """
    if index is not None:
        g = one_group(g, norm, index)
    return (groups(g, norm) / _safe(group_norms(g, norm))[..., None]).reshape(g.shape)


def _safe(sizes: Tensor) -> Tensor:
    """Denominators: zero becomes one, so that 0 / 0 is 0."""
    return torch.where(sizes > 0, sizes, torch.ones_like(sizes))
