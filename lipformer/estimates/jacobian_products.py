"""Products with the Jacobian of a function at an input, or at many at once, without ever building it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Map = Callable[[Tensor], Tensor]


@contextlib.contextmanager
def differentiable_kernels() -> Iterator[None]:
    """Gradients on, fused attention off.

    Fused attention kernels have neither forward mode nor a double backward; SDPA's MATH backend
    has both. Two remarks of torch's own machinery are not shown: that vmap lacks a rule for some
    operator (it is about speed), and that loading forward mode calls a deprecated function.
    """
    with (
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="There is a performance drop because")
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
        yield


def output_tensor(fn: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """fn(x), or its first element where fn returns a tuple, in the dtype of x."""
    output = fn(x)
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, Tensor) or not output.is_floating_point():
        given = output.dtype if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(
            f"fn must return a floating-point tensor, or a tuple whose first element is one; got {given}"
        )
    return output.to(x.dtype)


def detached_output(fn: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """`output_tensor` without a graph, through the very code that `Linearization` runs.

    torch.no_grad() would not do: torch's encoder layers take another path under it.
    """
    with differentiable_kernels():
        return output_tensor(fn, x.detach().requires_grad_()).detach()


def require_finite(value: Tensor, what: str) -> None:
    """ValueError unless entries are finite, one at least: elsewhere there is no local gain."""
    bad = int((~torch.isfinite(value)).sum())
    if bad or not value.numel():
        raise ValueError(
            f"{what} must be finite and not empty, got {bad} non-finite entries of {value.numel()}"
        )


class Linearization:
    r"""The linear map v -> J v, J = fn'(x), and its transpose u -> J^T u.

    fn is evaluated once and its graph is kept, so a random fn (dropout) is linearised at one
    draw. J^T u is one backward pass. J v differentiates the linear map u -> J^T u once more
    (d/du <J^T u, v> = J v); where that double backward is missing, forward mode is used, which
    evaluates fn again for each product.

    No parameter of fn is changed and none gets a gradient.

    Args:
        fn: Maps x to a tensor, or to a tuple whose first element is one.
        x: The point, of any shape.
        verify: Check once that <u, J v> = <J^T u, v> for a pair (u, v), and take forward mode
            where it fails: a backward pass written by hand may not be differentiable, silently.
    """

    def __init__(self, fn: Callable[[Tensor], Any], x: Tensor, *, verify: bool = True) -> None:
        self._fn = fn
        self._batched = True
        self._forward_mode = False
        with differentiable_kernels():
            self._x = x.detach().clone().requires_grad_()
            self._output = output_tensor(fn, self._x)
            if not self._output.requires_grad:
                raise ValueError(
                    "fn's output has no gradient with respect to x: it is constant, detached or "
                    "computed under torch.no_grad()"
                )
            self._u = torch.zeros_like(self._output).requires_grad_()
            self._pulled = self._grad(self._output, self._x, self._u, create_graph=True)
        self.x = self._x.detach()
        self.output = self._output.detach()
        if verify and not self._adjoint():
            self._forward_mode = True
            if not self._adjoint():
                raise RuntimeError(
                    "fn supports neither double backward nor forward-mode differentiation "
                    "(torch.func.jvp), or the two disagree: its Jacobian products are unreliable"
                )

    @property
    def twice_differentiable(self) -> bool:
        """False where J v had to be found by forward mode, so that `ascent` cannot work."""
        return not self._forward_mode

    def jvp(self, v: Tensor) -> Tensor:
        """J v: a tensor of x's shape to a tensor of the output's shape."""
        if self._forward_mode:
            with differentiable_kernels():
                pushed: Tensor = torch.func.jvp(
                    lambda t: output_tensor(self._fn, t), (self.x,), (v.to(self.x.dtype),)
                )[1]
            return pushed.detach()
        if not self._pulled.requires_grad:  # J^T u does not depend on u: J is zero
            return torch.zeros_like(self.output)
        return self._grad(self._pulled, self._u, v)

    def vjp(self, u: Tensor) -> Tensor:
        """J^T u: a tensor of the output's shape to a tensor of x's shape."""
        return self._grad(self._output, self._x, u)

    def jvps(self, v: Tensor) -> Tensor:
        """J v for each of the R tensors of a stack (R, *x.shape), in one pass where possible."""
        if self._forward_mode or not self._pulled.requires_grad:
            return torch.stack([self.jvp(one) for one in v])
        return self._grads(self._pulled, self._u, v)

    def vjps(self, u: Tensor) -> Tensor:
        """J^T u for each of the R tensors of a stack (R, *output.shape)."""
        return self._grads(self._output, self._x, u)

    def ascent(self, u: Tensor, v: Tensor) -> Tensor:
        """The gradient of <u, J(x) v> with respect to x, u and v held fixed.

        With v a unit vector and u = J v / |J v| this is the gradient of |J(x) v|; at a top
        singular pair it is the gradient of the spectral norm. Zero where fn is locally linear.
        """
        with differentiable_kernels():
            pulled = self._grad(self._output, self._x, u, create_graph=True)
            if not pulled.requires_grad:
                return torch.zeros_like(self.x)
            return self._grad((pulled * v).sum(), self._x, None)

    def _adjoint(self) -> bool:
        """Whether <u, J v> = <J^T u, v> holds for one fixed pair, to a coarse tolerance."""
        u, v = _ramp(self.output), _ramp(self.x, phase=1.0)
        try:
            pushed = self.jvp(v)
        except (RuntimeError, NotImplementedError):
            return False
        pulled = self.vjp(u)
        left, right = (u * pushed).double().sum(), (pulled * v).double().sum()
        size = u.double().norm() * pushed.double().norm() + pulled.double().norm() * v.norm()
        if not bool(torch.isfinite(size)):
            return True  # an infinite derivative is reported as such, later
        # Of steep networks both products are rounded, by far more than one rounding of their sizes.
        tolerance = max(1e-6, min(0.1, 1024 * torch.finfo(self.x.dtype).eps))
        return bool((left - right).abs() <= tolerance * size)

    @staticmethod
    def _grad(output: Tensor, at: Tensor, weight: Tensor | None, **options: bool) -> Tensor:
        weights = None if weight is None else weight.to(output.dtype)
        grad: Tensor | None = torch.autograd.grad(
            output, at, weights, retain_graph=True, allow_unused=True, **options
        )[0]
        return torch.zeros_like(at) if grad is None else grad

    def _grads(self, output: Tensor, at: Tensor, weights: Tensor) -> Tensor:
        if self._batched and len(weights) > 1:
            try:
                with differentiable_kernels():
                    return self._grad(output, at, weights, is_grads_batched=True)
            except RuntimeError:  # an operator without a batching rule
                self._batched = False
        return torch.stack([self._grad(output, at, one) for one in weights])


def _ramp(like: Tensor, phase: float = 0.0) -> Tensor:
    """A fixed vector with no special structure, in the shape of `like`."""
    index = torch.arange(like.numel(), device=like.device, dtype=torch.float32)
    return (1.7 * index + phase).cos().reshape(like.shape).to(like.dtype)


def independent_calls(fn: Callable[[Tensor], Any], probes: Tensor) -> Map:
    """A map (R, *shape) -> (R, *output shape) that applies fn to each of R inputs.

    The quickest of three ways that reproduces single calls on `probes`: the inputs as one larger
    batch; `torch.vmap`; a loop. The check is needed: a batch may be refused (a mask made for one
    batch size), and it may be taken for something else (a layer with batch_first=False reads a
    stack of (N, D) inputs as sequences across them).

    Args:
        fn: Maps a tensor of `shape` to a tensor or a tuple whose first element is one.
        probes: (P, *shape), different inputs of the sizes that will be used.
    """

    def loop(x: Tensor) -> Tensor:
        return torch.stack([output_tensor(fn, one) for one in x])

    def batch(x: Tensor) -> Tensor:
        if x.ndim <= 3:
            return output_tensor(fn, x)
        return output_tensor(fn, x.flatten(0, 1)).unflatten(0, x.shape[:2])

    def vmapped(x: Tensor) -> Tensor:
        return torch.vmap(lambda one: output_tensor(fn, one), randomness="different")(x)

    expected = detached_output(loop, probes)
    for way in (batch, vmapped):
        if _same(way, probes, expected):
            return way
    return loop


def _same(way: Map, probes: Tensor, expected: Tensor) -> bool:
    try:
        output = detached_output(way, probes)
    except Exception:  # whatever fn does with a shape it was not written for, it is no error here
        return False
    if output.shape != expected.shape:
        return False
    finite = torch.isfinite(expected).flatten(1).all(dim=1)
    error = (output - expected)[finite].abs().flatten(1)
    size = expected[finite].abs().flatten(1)
    if error.numel() == 0:
        return False
    tolerance = torch.finfo(expected.dtype).eps ** 0.5
    return bool((error.amax(dim=1) <= tolerance * size.amax(dim=1)).all())
