"""Token-wise layers: CenterNorm, BallProjection, MaxMin, LipSwish, FeedForward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from tests.layers.battery import CertifiedLayer, WithoutParameters, slow_compile


class TestCenterNorm(WithoutParameters):
    least = 0.99

    def make(self) -> nn.Module:
        return lf.CenterNorm(8)


class TestCenterNormAffine(CertifiedLayer):
    least = 0.5

    def make(self) -> nn.Module:
        return lf.CenterNorm(8, elementwise_affine=True)


class TestBallProjection(WithoutParameters):
    norms = ("l2", "token", "self")
    least = 0.99

    def make(self) -> nn.Module:
        return lf.BallProjection(2.0)


class TestMaxMin(WithoutParameters):
    least = 0.99

    def make(self) -> nn.Module:
        return lf.MaxMin()


class TestLipSwish(WithoutParameters):
    least = 0.99

    def make(self) -> nn.Module:
        return lf.LipSwish()


class TestFeedForward(CertifiedLayer):
    least = 0.1

    def make(self) -> nn.Module:
        return lf.FeedForward(8, 12, coeff=0.8)

    def test_the_constant_is_the_coefficient(self) -> None:
        assert 0.8 <= self.bound(self.made()) <= 0.8 * (1 + 1e-12)


class TestPlainFeedForward(CertifiedLayer):
    least = 0.1

    def make(self) -> nn.Module:
        return lf.FeedForward(8, 12, coeff=None, activation=nn.GELU(), bias=False)

    test_compile = slow_compile


def test_center_norm_is_its_formula() -> None:
    x = torch.randn(3, 5, 4, dtype=torch.float64) + 100
    want = 4 / 3 * (x - x.mean(-1, keepdim=True))
    torch.testing.assert_close(lf.CenterNorm(4)(x), want, rtol=0, atol=1e-12)
    affine = lf.CenterNorm(4, elementwise_affine=True).double()
    torch.testing.assert_close(affine(x), want, rtol=0, atol=1e-12)
    with torch.no_grad():
        affine.weight.copy_(torch.tensor([1.0, -3.0, 0.5, 2.0]))
        affine.bias.fill_(7.0)
    torch.testing.assert_close(affine(x), want * affine.weight + 7, rtol=0, atol=1e-12)
    assert lf.certify(affine).bound == pytest.approx(3 * 4 / 3)


@pytest.mark.parametrize("size", [0.0, 1e-30, 0.5, 1.0, 1.0 + 1e-6, 3.0, 1e10, 1e30])
def test_ball_projection(size: float) -> None:
    """Inside the ball the identity, outside the nearest point; also where squares overflow."""
    direction = torch.randn(4, 6)
    direction = direction / direction.norm(dim=-1, keepdim=True)
    x = (2.0 * size * direction).requires_grad_()
    out = lf.BallProjection(2.0)(x)
    torch.testing.assert_close(out, 2.0 * min(size, 1.0) * direction, rtol=1e-5, atol=1e-37)
    out.sum().backward()
    assert bool(torch.isfinite(x.grad).all())
    if size < 1:
        assert torch.equal(out, x)


def test_ball_projection_has_second_derivatives() -> None:
    x = torch.tensor([[0.3, 0.1], [3.0, -1.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lf.BallProjection(1.0), (x,))
    assert torch.autograd.gradgradcheck(lf.BallProjection(1.0), (x,))


def test_max_min_sorts_pairs() -> None:
    x = torch.tensor([[1.0, 5.0, 2.0, -3.0]])
    assert torch.equal(lf.MaxMin()(x), torch.tensor([[2.0, 5.0, 1.0, -3.0]]))
    y = torch.randn(7, 10)
    assert torch.equal(lf.MaxMin()(y).sort(-1).values, y.sort(-1).values)


def test_lip_swish_is_its_formula() -> None:
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    torch.testing.assert_close(lf.LipSwish()(x), x * torch.sigmoid(x) / 1.1)


def test_feed_forward_parts() -> None:
    layer = lf.FeedForward(4, 6, coeff=0.5, activation=nn.ReLU(), dropout=0.25)
    assert [name for name, _ in layer.named_children()] == ["up", "activation", "dropout", "down"]
    assert isinstance(layer.up, lf.SpectralLinear)
    assert isinstance(lf.FeedForward(4, 6).activation, lf.MaxMin)
    plain = lf.FeedForward(4, 6, coeff=None, bias=False)
    assert type(plain.up) is nn.Linear
    assert plain.down.bias is None
    x = torch.randn(3, 4)
    torch.testing.assert_close(layer.eval()(x), layer.down(torch.relu(layer.up(x))))
    with pytest.raises(lf.NotCertifiable, match="'dropout'"):
        lf.certify(layer.train())


def test_residuals_are_their_formulas() -> None:
    class Tuple(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return x.sin(), None

    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(lf.Residual(Tuple())(x), x + x.sin())
    torch.testing.assert_close(lf.ConvexResidual(Tuple(), 0.3)(x), 0.7 * x + 0.3 * x.sin())
    assert lf.certify(lf.Residual(nn.Tanh())).bound == pytest.approx(2.0)
    for weight in (0.0, 0.25, 1.0):
        bound = lf.certify(lf.ConvexResidual(nn.Sigmoid(), weight)).bound
        assert 1 - 0.75 * weight <= bound <= (1 - 0.75 * weight) * (1 + 1e-12)
    deep = nn.Sequential(*(lf.ConvexResidual(nn.Tanh()) for _ in range(100)))
    assert math.isclose(lf.certify(deep).bound, 1.0, rel_tol=1e-10)


def test_derivatives_of_max_min_in_every_mode() -> None:
    layer, x = lf.MaxMin(), torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x, check_batched_grad=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(layer, x)
    want = torch.autograd.functional.jacobian(layer, x[0])
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        assert torch.equal(jacobian(layer)(x[0].detach()), want)
        assert torch.equal(torch.func.vmap(jacobian(layer))(x.detach())[0], want)
    twin = torch.func.vmap(layer)(x.detach())
    assert torch.equal(twin, layer(x))


@pytest.mark.parametrize("wrapper", [lf.Residual, lf.ConvexResidual])
def test_a_branch_that_broadcasts(wrapper: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"keep the shape \(2, 8\) of its input, got \(2, 1\)"):
        wrapper(nn.Linear(8, 1))(torch.randn(2, 8))


def test_max_min_of_the_largest_numbers() -> None:
    x = torch.tensor([[3e38, -3e38], [-3e38, 3e38]])
    assert torch.equal(lf.MaxMin()(x), torch.tensor([[3e38, -3e38], [3e38, -3e38]]))
