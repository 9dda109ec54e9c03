"""Products with the transposed Jacobian of a function at a point of its graph."""

from __future__ import annotations

import torch
from torch import Tensor


def pull(out: Tensor, x: Tensor, weight: Tensor, *, create_graph: bool = False) -> Tensor:
    """J^T w for out = f(x): one backward pass; the graph of ``out`` is kept.

    Args:
        out: f(x), of x's shape.
        x: the point, a tensor in the graph of ``out``.
        weight: w, of out's shape.
        create_graph: make the result differentiable.
    """
    if not out.requires_grad:
        return torch.zeros_like(x)
    grad: Tensor | None = torch.autograd.grad(
        out, x, weight.to(out.dtype), retain_graph=True, create_graph=create_graph, allow_unused=True
    )[0]
    return torch.zeros_like(x) if grad is None else grad


def pull_all(out: Tensor, x: Tensor, weights: Tensor, *, create_graph: bool = False) -> Tensor:
    """J^T w for each w of a stack (R, *out.shape), in one batched pass where torch can."""
    if not out.requires_grad:
        return torch.zeros_like(weights)
    try:
        grad: Tensor | None = torch.autograd.grad(
            out,
            x,
            weights,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
            is_grads_batched=True,
        )[0]
    except RuntimeError:  # an operator without a batching rule
        return torch.stack([pull(out, x, weight, create_graph=create_graph) for weight in weights])
    return torch.zeros_like(weights) if grad is None else grad
