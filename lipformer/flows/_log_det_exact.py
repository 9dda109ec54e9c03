"""The log-determinant from the dense Jacobian: for tests and small events."""

from __future__ import annotations

import torch
from torch import Tensor

from lipformer.flows._pullback import pull_all

# Entries of a batch of output directions that are pulled back at once.
_BUDGET = 2**22


def dense_jacobian(out: Tensor, x: Tensor, *, create_graph: bool) -> Tensor:
    """The Jacobian of each sample, (B, n, n) with n = T D, rows for outputs.

    Samples must not influence each other. Pulls back the n output directions, a chunk of them at a
    time, so that only the result is of size B n^2 unless a graph is asked for.

    Args:
        out: f(x) (B, T, D), in a graph that x is in.
        x: (B, T, D).
        create_graph: make the Jacobian differentiable.
    """
    batch, tokens, width = out.shape
    n = tokens * width
    chunk = max(1, min(n, _BUDGET // max(1, batch * tokens * (tokens + width))))
    directions = torch.eye(n, dtype=out.dtype, device=out.device).view(n, 1, tokens, width)
    rows = [
        pull_all(out, x, part.expand(-1, batch, -1, -1), create_graph=create_graph)
        for part in directions.split(chunk)
    ]
    return torch.cat(rows).reshape(n, batch, n).transpose(0, 1)


def exact_log_det(out: Tensor, x: Tensor, *, create_graph: bool) -> Tensor:
    r""":math:`\log|\det(I + J)|` of each sample by an LU factorisation, (B,).

    Source: docs/theory, section 6. Cost :math:`TD` backward passes and :math:`O((TD)^3)`.

    Args:
        out: f(x) (B, T, D), in a graph that x is in.
        x: (B, T, D).
        create_graph: make the result differentiable.
    """
    jacobian = dense_jacobian(out, x, create_graph=create_graph)
    jacobian = jacobian.to(torch.promote_types(jacobian.dtype, torch.float32))
    one = torch.eye(jacobian.shape[-1], dtype=jacobian.dtype, device=jacobian.device)
    return torch.linalg.slogdet(one + jacobian).logabsdet
