"""Exact log-determinants: from the dense Jacobian, and token by token for causal branches.

The dense one serves every branch on small events; causal and token-wise branches need the diagonal
blocks alone (docs/theory, section 6).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lipformer.flows.masked_branch import derivatives, masked_branch
from lipformer.functional.pullback import pull_all
from lipformer.layers.branch import Call
from lipformer.layers.layout import without_padding
from lipformer.layers.own_token import push_own, unknown_parts
from lipformer.layers.residual import same_shape

# Entries of a batch of output directions that are pulled back at once.
_BUDGET = 2**22
# Entries of the dense Jacobians that are kept at once where no graph is wanted.
_ENTRIES = 2**24


def jacobian_rows(out: Tensor, x: Tensor, *, create_graph: bool) -> Iterator[Tensor]:
    """The rows (R, B, n) of each sample's Jacobian, n = T D, a few at a time; see dense_jacobian."""
    batch, tokens, width = out.shape
    n = tokens * width
    chunk = max(1, min(n, _BUDGET // max(1, batch * tokens * (tokens + width))))
    for part in torch.eye(n, dtype=out.dtype, device=out.device).split(chunk):
        directions = part.view(-1, 1, tokens, width).expand(-1, batch, -1, -1)
        yield pull_all(out, x, directions, create_graph=create_graph).flatten(2)


def dense_jacobian(out: Tensor, x: Tensor, *, create_graph: bool) -> Tensor:
    """The Jacobian of each sample, (B, n, n) with n = T D, rows for outputs.

    Samples must not influence each other.

    Args:
        out: f(x) (B, T, D), in a graph that x is in.
        x: (B, T, D).
        create_graph: make the Jacobian differentiable.
    """
    return torch.cat(list(jacobian_rows(out, x, create_graph=create_graph))).transpose(0, 1)


def exact_log_det(out: Tensor, x: Tensor, *, create_graph: bool) -> Tensor:
    r""":math:`\log|\det(I + J)|` of each sample by an LU factorisation, (B,).

    Source: docs/theory, section 6. Cost :math:`TD` backward passes and :math:`O((TD)^3)`.

    Args:
        out: f(x) (B, T, D), in a graph that x is in.
        x: (B, T, D).
        create_graph: make the result differentiable.
    """
    return log_det_of(dense_jacobian(out, x, create_graph=create_graph))


def log_det_of(jacobian: Tensor) -> Tensor:
    """log|det(I + J)| of (B, n, n), (B,), in at least float32."""
    return torch.linalg.slogdet(_one_plus(jacobian)).logabsdet


def _one_plus(jacobian: Tensor) -> Tensor:
    """I + J in at least float32."""
    jacobian = jacobian.to(torch.promote_types(jacobian.dtype, torch.float32))
    return jacobian + torch.eye(jacobian.shape[-1], dtype=jacobian.dtype, device=jacobian.device)


class _Masked(nn.Module):
    """:func:`masked_branch` as a module, to be called with given parameters and a given context."""

    context: Tensor | None

    def __init__(self, branch: nn.Module, call: Call) -> None:
        super().__init__()
        self.branch = branch
        self.padding = call.key_padding_mask
        self.register_buffer("context", call.context)

    def forward(self, x: Tensor, part: slice) -> Tensor:
        call = Call(self.padding, context=self.context)
        return masked_branch(self.branch, x, call.select(part))


class _LazyExact(torch.autograd.Function):
    r""":func:`exact_log_det` of bounded memory: no graph is kept, derivatives are computed if asked for.

    A few samples at a time, and in the backward pass a few rows: with :math:`A = I + J`,
    :math:`d \log|\det A| = \sum_{ij} (A^{-1})_{ji}\, dJ_{ij}`. Where the gradient
    is to be differentiated again, it is that of :func:`exact_log_det`, with its memory. Parameters and
    context are passed as tensors, by which the backward pass calls the branch again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        masked: _Masked,
        names: list[str],
        x: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.masked, ctx.names = masked, names
        ctx.save_for_backward(x, *weights)
        values = []
        with derivatives(masked, x):
            for part in _parts(x):
                point = x[part].detach().requires_grad_()
                values.append(exact_log_det(masked(point, part), point, create_graph=False))
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        named = dict(zip(ctx.names, weights, strict=True))
        if torch.is_grad_enabled():  # asked for with create_graph=True
            with derivatives(ctx.masked, x):
                point = x if x.requires_grad else x.detach().requires_grad_()
                out = torch.func.functional_call(ctx.masked, named, (point, slice(None)))
                value = exact_log_det(out, point, create_graph=True)
                grads = torch.autograd.grad(
                    value, (point, *weights), grad, create_graph=True, materialize_grads=True
                )
            return (None, None, *grads)
        total = [torch.zeros_like(x), *map(torch.zeros_like, weights)]
        for part in _parts(x):
            with derivatives(ctx.masked, x):
                point = x[part].detach().requires_grad_()
                out = torch.func.functional_call(ctx.masked, named, (point, part))
                inverse = torch.linalg.inv(_one_plus(dense_jacobian(out, point, create_graph=False)))
                columns = iter(inverse.permute(2, 0, 1).to(x.dtype))
                for rows in jacobian_rows(out, point, create_graph=True):
                    weight = torch.stack([next(columns) for _ in rows]) * grad[part, None].to(x.dtype)
                    if not rows.requires_grad:
                        continue
                    gradients = torch.autograd.grad(
                        rows, (point, *weights), weight, retain_graph=True, materialize_grads=True
                    )
                    total[0][part] += gradients[0]
                    for sum_, gradient in zip(total[1:], gradients[1:], strict=True):
                        sum_ += gradient
        return (None, None, *total)


def lazy_exact_log_det(branch: nn.Module, x: Tensor, call: Call) -> Tensor:
    """:func:`exact_log_det` of a branch at x (B, T, D), with :class:`_LazyExact`'s gradient."""
    masked = _Masked(branch, call)
    tensors = (*masked.named_parameters(), *masked.named_buffers())
    named = {name: tensor for name, tensor in tensors if tensor.requires_grad}
    value: Tensor = _LazyExact.apply(masked, list(named), x, *named.values())
    return value


def _parts(x: Tensor) -> Iterator[slice]:
    """Samples whose dense Jacobians have at most _ENTRIES entries, at least one sample."""
    size = max(1, _ENTRIES // max(1, x.shape[1:].numel() ** 2))
    return (slice(i, i + size) for i in range(0, max(1, len(x)), size))


def supports_causal(branch: nn.Module) -> bool:
    """Whether a branch is known to be causal: token-wise or causal=True all the way down.

    Known are nn.Linear, nn.Sequential, the usual activations, LayerNorm and RMSNorm of one dimension,
    lipformer's layers, attention built with causal=True, and any module with an attribute
    ``token_wise = True`` or ``causal = True``.

    Example:
        >>> import lipformer as lf
        >>> supports_causal(lf.FeedForward(4, 8)), supports_causal(lf.L2MultiheadAttention(4, 2))
        (True, False)
    """
    return next(unknown_parts(branch), None) is None


def check_causal(branch: nn.Module) -> None:
    """Raises unless :func:`supports_causal`, and names the part that is not known."""
    for path, module in unknown_parts(branch):
        causal = getattr(module, "causal", "no attribute causal")
        raise ValueError(
            f"method 'causal' needs a branch that is causal or token-wise all the way down, but {path} "
            f"({type(module).__name__}, causal={causal!r}) is not known to be; use method 'series', "
            "'roulette' or 'exact', or attention with causal=True; a module of your own may say so "
            "with an attribute causal = True or token_wise = True"
        )


def causal_log_det(branch: nn.Module, x: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    r""":math:`\sum_i \log|\det(I + J_{ii})|`: exact, as I + J is block lower triangular.

    Source: docs/theory, section 6. Needs first derivatives only, in closed form for attention.

    Args:
        branch: causal all the way down.
        x: (B, T, D).
        call: the padding as bool (B, T) and the context (B, C), where there are any.

    Returns:
        The branch's output (B, T, D), zero at padded tokens, and (B,).
    """
    padding, width = call.key_padding_mask, x.shape[-1]
    one = torch.eye(width, dtype=x.dtype, device=x.device)
    tangents = one[:, None, None].expand(-1, *x.shape)
    out, pushed = push_own(branch, without_padding(x, padding), tangents, *call)
    out = without_padding(same_shape(x, out), padding)
    # (B, T, D, D), the transposed blocks: row r is J_ii times the r-th direction.
    blocks = without_padding(pushed, padding).movedim(0, -2)
    blocks = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
    return out, torch.linalg.slogdet(one.to(blocks.dtype) + blocks).logabsdet.sum(-1)
