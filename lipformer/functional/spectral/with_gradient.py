"""Give a rounded value the derivatives of the smooth function it bounds.

Rounding up, verification by a factorisation and Lanczos vectors cannot be differentiated by
recording their operations. A `Recipe` states value, gradient and Hessian instead; this module makes
them known to autograd (any mode), torch.func and torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Recipe(NamedTuple):
    """A function of a matrix, (*, m, n) -> (*,), by its value and derivatives.

    value: weight -> the value and tensors that its derivatives need, each with the leading
        dimensions * in front; need not be differentiable.
    gradient: (weight, *needed) -> (*, m, n); need not be differentiable.
    hessian: (weight, direction, *needed) -> (*, m, n), the derivative of the gradient along
        direction. A Hessian is symmetric, so this one product serves both modes.
    """

    value: Callable[..., tuple[Tensor, ...]]
    gradient: Callable[..., Tensor]
    hessian: Callable[..., Tensor]


def _batch_first(info: Any, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> list[Any]:
    """The vmapped dimension in front of every tensor: all recipes are batched over leading ones."""
    return [
        arg
        if not isinstance(arg, Tensor)
        else arg.expand(info.batch_size, *arg.shape)
        if dim is None
        else arg.movedim(dim, 0)
        for arg, dim in zip(args, in_dims, strict=True)
    ]


def _refuse_nested_forward_mode() -> None:
    """Within the jvp of a Function torch drops the tangents of outer levels, without a word."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    if sum(level.key() == torch._C._functorch.TransformType.Jvp for level in stack) > 1:
        raise RuntimeError(
            "forward mode over forward mode (a jvp of a jvp, jacfwd of jacfwd) is not supported: "
            "take at least one of the two derivatives in reverse mode, e.g. jacfwd(jacrev(f))"
        )


class _Gradient(torch.autograd.Function):
    """The gradient as a differentiable function: its Hessian is evaluated only if asked for."""

    @staticmethod
    def forward(recipe: Recipe, weight: Tensor, *needed: Tensor) -> Tensor:
        return recipe.gradient(weight, *needed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.recipe = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *needed = ctx.saved_tensors
        product = ctx.recipe.hessian(weight, grad, *needed)
        return None, product.to(weight.dtype), *(None for _ in needed)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *__: None) -> Tensor:
        _refuse_nested_forward_mode()
        weight, *needed = ctx.saved_tensors
        return ctx.recipe.hessian(weight, tangent, *needed)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        return _Gradient.apply(*_batch_first(info, in_dims, args)), 0


class _Value(torch.autograd.Function):
    """The value, and what its derivatives need as further outputs."""

    @staticmethod
    def forward(recipe: Recipe, weight: Tensor) -> tuple[Tensor, ...]:
        return recipe.value(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.recipe = inputs[0]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[1], *output[1:])
        ctx.save_for_forward(inputs[1], *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[None, Tensor]:
        weight, *needed = ctx.saved_tensors
        gradient = _Gradient.apply(ctx.recipe, weight, *needed)
        return None, (grad[..., None, None] * gradient).to(weight.dtype)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_nested_forward_mode()
        weight, *needed = ctx.saved_tensors
        gradient = _Gradient.apply(ctx.recipe, weight, *needed)
        return (gradient * tangent).sum(dim=(-2, -1)), *(None for _ in needed)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        outputs = _Value.apply(*_batch_first(info, in_dims, args))
        return outputs, (0,) * len(outputs)


def with_gradient(
    recipe: Recipe, weight: Tensor, compiled_value: Callable[[Tensor], list[Tensor]]
) -> Tensor:
    """The recipe's value at weight, (*, m, n) -> (*,), differentiable twice.

    While compiling, where a Function with a forward mode is refused, the gradient is attached as a
    term of value zero: first derivatives only, as AOTAutograd supports no others.

    Args:
        recipe: value and derivatives.
        weight: (*, m, n).
        compiled_value: stands for recipe.value in a compiled graph. An exported graph holds the
            operations of recipe.value themselves, so that it runs without this package.
    """
    if not torch.compiler.is_compiling():
        return _Value.apply(recipe, weight)[0]
    evaluate = recipe.value if torch.compiler.is_exporting() else compiled_value
    with torch.no_grad():
        value, *needed = evaluate(weight.detach())
        gradient = recipe.gradient(weight.detach(), *needed)
    slope = (weight * gradient).sum(dim=(-2, -1))
    return value + (slope - slope.detach()).to(value.dtype)
