"""Gradients through the inverse: implicit, exact, for y and for every parameter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import lipformer as lf
from tests.flows.blocks import branch
from tests.layers.battery import error, scrambled

F64 = torch.float64
B, T, D = 2, 4, 4


def block(name: str, mode: str = "norm", coeff: float = 0.9, **options: object) -> lf.InvertibleResidual:
    torch.manual_seed(3)
    inner = branch(name, D, causal=mode == "causal", max_len=8)
    return scrambled(lf.InvertibleResidual(inner, coeff, mode, **options)).double().eval()


CASES = [
    ("attention", {"coeff": 0.9, "norm": "l2"}),
    ("attention", {"coeff": 0.9, "norm": "token"}),
    ("paper", {"coeff": 0.9, "norm": "linf"}),
    ("sequence", {"coeff": 0.97}),
    ("attention", {"coeff": 0.9, "mode": "causal"}),
    ("sequence", {"coeff": 0.97, "mode": "causal"}),
]


def padded() -> Tensor:
    mask = torch.zeros(B, T, dtype=torch.bool)
    mask[1, 0] = True
    return mask


@pytest.mark.parametrize("mask", [None, padded()], ids=["", "padded"])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_gradients_are_those_of_finite_differences(
    name: str, options: dict[str, object], mask: Tensor | None
) -> None:
    made = block(name, **options)
    names = [key for key, _ in made.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in made.parameters()]
    y = (1.5 * torch.randn(B, T, D, dtype=F64)).requires_grad_()

    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made = made

        def forward(self, y: Tensor) -> Tensor:
            return self.made.inverse(y, mask, tol=1e-14)

    module = Inverse()

    def inverse(y: Tensor, *parameters: Tensor) -> Tensor:
        state = {f"made.{key}": value for key, value in zip(names, parameters, strict=True)}
        return functional_call(module, state, (y,))

    assert torch.autograd.gradcheck(inverse, (y, *values), fast_mode=True, atol=1e-6)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_gradients_are_the_inverse_of_those_of_forward(name: str, options: dict[str, object]) -> None:
    """x = inverse(forward(x)) for all weights: the two gradients for a weight cancel."""
    made = block(name, **options)
    x = torch.randn(B, T, D, dtype=F64, requires_grad=True)
    g = torch.randn(B, T, D, dtype=F64)
    (made.inverse(made(x), tol=1e-14) * g).sum().backward()
    assert error(x.grad, g) <= 1e-10
    for key, parameter in made.named_parameters():
        assert parameter.grad.abs().max() <= 1e-10, key
    y = made(x.detach()).detach()
    made.zero_grad()
    (made.inverse(y, tol=1e-14) * g).sum().backward()
    assert all(p.grad.abs().max() > 1e-8 for p in made.parameters()), "the control: they are not zero"


@pytest.mark.parametrize("size", [1e-12, 1e8])
def test_small_and_large_gradients_are_as_exact(size: float) -> None:
    made = block("attention", coeff=0.9)
    y, g = torch.randn(B, T, D, dtype=F64, requires_grad=True), torch.randn(B, T, D, dtype=F64)
    (want,) = torch.autograd.grad(made.inverse(y, tol=1e-12), y, g)
    (got,) = torch.autograd.grad(made.inverse(y, tol=1e-12), y, size * g)
    assert error(got / size, want) <= 1e-10


def test_inside_a_freeze_gradients_still_reach_the_weights() -> None:
    made = block("attention", coeff=0.9)
    y = torch.randn(B, T, D, dtype=F64)
    want = torch.autograd.grad(made.inverse(y, tol=1e-13).sum(), list(made.parameters()))
    with lf.frozen(made):
        x = made.inverse(y, tol=1e-13)
    got = torch.autograd.grad(x.sum(), list(made.parameters()))
    assert all(error(a, b) <= 1e-9 for a, b in zip(got, want, strict=True))


def test_no_graph_without_need_and_no_second_derivative() -> None:
    made = block("attention", coeff=0.9)
    y = torch.randn(B, T, D, dtype=F64, requires_grad=True)
    with torch.no_grad():
        assert not made.inverse(y).requires_grad
    with torch.inference_mode():
        assert not made.inverse(torch.randn(B, T, D, dtype=F64)).requires_grad
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(made.inverse(y).sum(), y, create_graph=True)


def test_values_are_the_same_with_and_without_gradient() -> None:
    made = block("sequence", coeff=0.9)
    y = torch.randn(B, T, D, dtype=F64)
    with torch.no_grad():
        plain = made.inverse(y)
    assert torch.equal(made.inverse(y), plain)


def test_gradients_that_are_not_finite_stay_so() -> None:
    made = block("attention", coeff=0.9)
    y = torch.randn(B, T, D, dtype=F64, requires_grad=True)
    (grad,) = torch.autograd.grad(made.inverse(y), y, torch.full((B, T, D), torch.inf, dtype=F64))
    assert bool(torch.isnan(grad).all())
