"""Derivatives of spectral_norm_bound, and the transforms under which they must hold."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap

from lipformer.functional import spectral_norm_bound

# Forward mode compiles torch's own decompositions with torch.jit.script when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

METHODS = ["cholesky", "gram", "svd"]
F64 = torch.float64


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (4, 3), (3, 4), (2, 3, 3)])
def test_gradcheck(method: str, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, dtype=F64, requires_grad=True)

    f = partial(spectral_norm_bound, method=method)
    assert torch.autograd.gradcheck(f, (weight,), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, (weight,), check_fwd_over_rev=True)


def test_gradient_at_sizes_that_use_lanczos_and_strips(method: str) -> None:
    """Central differences along random directions, for a matrix with a clear top value."""
    weight = torch.randn(80, 70, dtype=F64)
    weight = weight + torch.outer(torch.randn(80), torch.randn(70))
    weight.requires_grad_()
    slope = torch.autograd.grad(spectral_norm_bound(weight, method=method), weight)[0]
    for _ in range(5):
        step = 1e-6 * torch.randn_like(weight)
        with torch.no_grad():
            up = spectral_norm_bound(weight + step, method=method)
            down = spectral_norm_bound(weight - step, method=method)
        assert (slope * step).sum().item() == pytest.approx((up - down).item() / 2, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradient_in_low_precision(method: str, dtype: torch.dtype) -> None:
    """The gradient has the weight's dtype and is u v^T of the float64 SVD."""
    weight = (torch.randn(90, 70) + torch.outer(torch.ones(90), torch.ones(70))).to(dtype)
    weight.requires_grad_()
    slope = torch.autograd.grad(spectral_norm_bound(weight, method=method), weight)[0]
    assert slope.dtype == dtype
    u, _, vh = torch.linalg.svd(weight.detach().double())
    exact = torch.outer(u[:, 0], vh[0])
    tolerance = 0.01 + 2 * torch.finfo(dtype).eps
    assert (slope.double() - exact).norm() <= tolerance * exact.norm()


def test_euler_identity(method: str) -> None:
    """The bound is homogeneous of degree 1: <gradient, W> = bound, for Gaussian weights too."""
    weight = torch.randn(3, 100, 100, dtype=F64, requires_grad=True)
    bound = spectral_norm_bound(weight, method=method)
    slope = torch.autograd.grad(bound.sum(), weight)[0]
    torch.testing.assert_close((slope * weight).sum(dim=(-2, -1)), bound, rtol=1e-7, atol=0)


def test_lanczos_gradient_is_nearly_a_subgradient() -> None:
    """||W'|| >= ||W|| (1 - 1%) + <u v^T, W' - W> for all W', by convexity."""
    weight = torch.randn(150, 150, dtype=F64, requires_grad=True)
    bound = spectral_norm_bound(weight)
    slope = torch.autograd.grad(bound, weight)[0] / bound.detach()
    norm = torch.linalg.matrix_norm(weight.detach(), 2)
    for scale in (1e-3, 0.1, 1.0, 10.0):
        other = weight.detach() + scale * torch.randn_like(weight)
        rise = norm * (slope * (other - weight.detach())).sum()
        assert torch.linalg.matrix_norm(other, 2) >= 0.99 * norm + 0.98 * rise - 0.02 * rise.abs()


@pytest.mark.parametrize("values", [[3.0, 1.0, 1.0, 1.0], [2.0, 0.0, 0.0, 0.0], [3.0, 2.0, 2.0, 0.0]])
def test_second_derivative_with_repeated_smaller_values(values: list[float]) -> None:
    """The derivative of a general SVD is infinite here; that of the norm is not."""
    u = torch.linalg.qr(torch.randn(5, 4, dtype=F64)).Q
    v = torch.linalg.qr(torch.randn(4, 4, dtype=F64)).Q
    weight = ((u * torch.tensor(values, dtype=F64)) @ v.mT).requires_grad_()
    for method in ("cholesky", "svd"):
        assert torch.autograd.gradgradcheck(
            lambda w, m=method: spectral_norm_bound(w, method=m), (weight,)
        )


def test_second_derivative_of_an_orthogonal_matrix_is_finite() -> None:
    weight = torch.linalg.qr(torch.randn(6, 6, dtype=F64)).Q.requires_grad_()
    first = torch.autograd.grad(spectral_norm_bound(weight), weight, create_graph=True)[0]
    assert torch.autograd.grad(first.square().sum(), weight)[0].isfinite().all()


def test_hessians_agree_in_every_mode(method: str) -> None:
    weight = torch.randn(4, 3, dtype=F64)

    f = partial(spectral_norm_bound, method=method)
    reference = torch.autograd.functional.hessian(f, weight)
    modes: tuple[Any, ...] = (jacrev, jacfwd)
    for outer, inner in itertools.product(modes, repeat=2):
        if outer is inner is jacfwd:
            with pytest.raises(RuntimeError, match="reverse mode"):
                outer(inner(f))(weight)
        else:
            torch.testing.assert_close(outer(inner(f))(weight), reference)


@pytest.mark.parametrize("shape", [(4, 3), (70, 80)])
def test_functional_transforms(method: str, shape: tuple[int, int]) -> None:
    weights, tangent = torch.randn(3, *shape, dtype=F64), torch.randn(shape, dtype=F64)

    f = partial(spectral_norm_bound, method=method)
    leaf = weights[0].clone().requires_grad_()
    slope = torch.autograd.grad(f(leaf), leaf)[0]
    close = torch.testing.assert_close
    close(grad(f)(weights[0]), slope)
    close(vjp(f, weights[0])[1](torch.tensor(2.0, dtype=F64))[0], 2 * slope)
    close(jvp(f, (weights[0],), (tangent,))[1], (slope * tangent).sum())
    close(vmap(f)(weights), f(weights), rtol=1e-12, atol=0)
    close(vmap(f, in_dims=2)(weights.movedim(0, 2)), f(weights), rtol=1e-12, atol=0)
    close(vmap(vmap(f))(weights.unsqueeze(1)), f(weights).unsqueeze(1), rtol=1e-12, atol=0)
    close(vmap(grad(f))(weights)[0], slope)
    along = vmap(lambda t: jvp(f, (weights[0],), (t,))[1])(weights)
    close(along, (slope * weights).sum(dim=(-2, -1)))


class Normalised(nn.Module):
    """y = x W^T / bound(W): what a layer does with the bound."""

    def __init__(self, n: int, method: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, n))
        self.method = method

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight / spectral_norm_bound(self.weight, method=self.method)).mT


def test_jvp_in_other_inputs_of_a_functional_call(method: str) -> None:
    module = Normalised(70, method)
    params: dict[str, Tensor] = dict(module.named_parameters())
    x, t = torch.randn(2, 70), torch.randn(2, 70)
    result = jvp(lambda x: functional_call(module, params, (x,)), (x,), (t,))
    torch.testing.assert_close(result[0], module(x))
    torch.testing.assert_close(result[1], module(t))


def test_compile_fullgraph(method: str) -> None:
    torch._dynamo.reset()
    n = 70
    module, x = Normalised(n, method), torch.randn(2, n)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    expected, got = module(x), compiled(x)
    torch.testing.assert_close(got, expected)
    (reference,) = torch.autograd.grad(expected.square().sum(), module.weight)
    (slope,) = torch.autograd.grad(got.square().sum(), module.weight)
    torch.testing.assert_close(slope, reference)


def test_compile_under_autocast() -> None:
    """Only the Lanczos part runs below float64, so only it could be touched."""
    torch._dynamo.reset()
    weight = torch.randn(70, 70)
    compiled = torch.compile(spectral_norm_bound, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(weight) == spectral_norm_bound(weight)
    assert compiled(weight) == spectral_norm_bound(weight)


@pytest.mark.skipif(
    torch.__version__.startswith("2.9."), reason="torch 2.9 has no batching rule of view.dtype there"
)
def test_compile_with_transforms() -> None:
    torch._dynamo.reset()
    weights = torch.randn(2, 6, 5)
    for transform in (vmap(spectral_norm_bound), vmap(grad(spectral_norm_bound))):
        compiled = torch.compile(transform, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(weights), transform(weights))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_compile_with_inductor() -> None:
    torch._dynamo.reset()
    module, x = Normalised(100, "cholesky"), torch.randn(2, 100)
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))


def test_export_holds_plain_operators(method: str) -> None:
    """The exported program recomputes the bound from its weight and does not need this package."""
    module, x = Normalised(70, method), torch.randn(2, 70)
    program = torch.export.export(module, (x,))
    assert not [node for node in program.graph.nodes if "lipformer" in str(node.target)]
    torch.testing.assert_close(program.module()(x), module(x))
