r"""Gradients through a solution, by the implicit function theorem instead of through the iterations.

At the solution x of x + f(x; theta) = y, a cotangent g becomes u with :math:`(I + J^T) u = g`; then u is
the gradient for y and :math:`-(\partial f/\partial\theta)^T u` that for the parameters
(docs/theory, section 5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lipformer.functional.pullback import pull

Solve = Callable[[Tensor], Tensor]


class _Implicit(torch.autograd.Function):
    """Passes the solution on, and in the backward pass the cotangent through ``solve``."""

    @staticmethod
    def forward(ctx: Any, step: Tensor, solution: Tensor, solve: Solve) -> Tensor:
        ctx.solve = solve
        return solution.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradient of an inverse cannot be differentiated again (create_graph=True); "
                "differentiate forward instead: the two are inverse maps"
            )
        return ctx.solve(grads[0]), None, None


def attach_gradient(
    fn: Callable[[Tensor], Tensor],
    y: Tensor,
    solution: Tensor,
    solve_transposed: Callable[[Callable[[Tensor, Tensor], Tensor], Tensor], Tensor],
) -> Tensor:
    r"""The solution of x + f(x) = y with its gradient for y and for the parameters of f.

    Args:
        fn: f, (B, T, D) -> (B, T, D); evaluated once, with a graph.
        y: right-hand side (B, T, D).
        solution: x (B, T, D).
        solve_transposed: given u -> J^T u for samples (b, T, D) and indices (b,), and g, solves
            u + J^T u = g.

    Returns:
        x, differentiable once.
    """
    point = solution.detach().requires_grad_()
    value = fn(point)
    step = y - value

    def transposed(u: Tensor, index: Tensor) -> Tensor:
        full = torch.zeros_like(point).index_copy(0, index, u)
        return pull(value, point, full)[index]

    def solve(g: Tensor) -> Tensor:
        if not bool(torch.isfinite(g).all()):
            # As every other backward pass does: gradient scalers look for it.
            return torch.full_like(g, torch.nan)
        # In units of each sample's largest entry: a tolerance means nothing for gradients of 1e-9.
        unit = g.abs().amax((1, 2), keepdim=True)
        unit = torch.where(unit > 0, unit, 1.0)
        return solve_transposed(transposed, (g / unit).contiguous()) * unit

    if not value.requires_grad:
        return step
    out: Tensor = _Implicit.apply(step, solution.detach(), solve)
    return out
