"""PairRadial: its constant, symmetries and closed-form Jacobian."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.layers import PairRadial
from lipformer.layers.pair_radial import radial_profile
from tests.layers.battery import CertifiedLayer, slow_compile
from tests.oracles import dense_jacobian

PADDED = torch.tensor([[False, False, True, False, True]])


class TestPairRadial(CertifiedLayer):
    tokens = (5, 3)
    norms = ("l2",)
    variants = ("plain", "padded")
    attacked = (("l2", "plain"), ("l2", "padded"))
    least = 0.2

    def make(self) -> nn.Module:
        return PairRadial(6, 3.0)

    test_compile = slow_compile

    def call(self, module: nn.Module, x: Tensor, variant: str = "plain") -> Tensor:
        return module(x) if variant == "plain" else module(x, PADDED.expand(len(x), -1))


def steep(knots: int = 8, dtype: torch.dtype = torch.float64) -> PairRadial:
    layer = PairRadial(knots, 3.0).to(dtype)
    nn.init.normal_(layer.raw_slopes, std=2.0)
    return layer


def test_the_profile_is_the_integral_of_its_slope() -> None:
    slopes = torch.randn(5, dtype=torch.float64)
    s = torch.linspace(1e-3, 7.0, 30, dtype=torch.float64, requires_grad=True)
    ratio, slope = radial_profile(s, slopes, 4.0)
    (gradient,) = torch.autograd.grad((ratio * s).sum(), s)
    torch.testing.assert_close(gradient, slope)
    at_knots = radial_profile(torch.arange(5.0, dtype=torch.float64).clamp_min(1e-9), slopes, 4.0)[1]
    torch.testing.assert_close(at_knots, slopes)
    torch.testing.assert_close(ratio[0], slopes[0], rtol=0, atol=1e-2)


@pytest.mark.parametrize("mask", [None, PADDED.expand(2, -1)])
def test_the_jacobian_in_closed_form(mask: Tensor | None) -> None:
    layer = steep()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    out, jacobian = layer.forward_and_jacobian(x, mask)
    torch.testing.assert_close(out, layer(x, mask))
    for k in range(2):
        row = None if mask is None else mask[k : k + 1]
        expected = dense_jacobian(lambda x, row=row: layer(x, row), x[k : k + 1])
        torch.testing.assert_close(jacobian[k], expected.reshape(15, 15))
    torch.testing.assert_close(jacobian, jacobian.mT)
    assert torch.autograd.gradcheck(layer.forward_and_jacobian, (x[:1].requires_grad_(),))


def test_it_turns_permutes_and_stays_where_it_is() -> None:
    layer, x = steep(), torch.randn(3, 5, 3, dtype=torch.float64)
    out = layer(x)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(layer(x @ turn), out @ turn)
    torch.testing.assert_close(layer(x[:, order]), out[:, order])
    torch.testing.assert_close(layer(x + 5.0), out)
    torch.testing.assert_close(out.sum(1), torch.zeros(3, 3, dtype=torch.float64))


def test_the_constant_is_attained_and_no_smaller_one_holds() -> None:
    layer = PairRadial().double()
    nn.init.constant_(layer.raw_slopes, 20.0)  # G(s) = s
    x = torch.randn(1, 4, 2, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x - x.mean(1, keepdim=True))
    _, jacobian = layer.forward_and_jacobian(x)
    found = torch.linalg.matrix_norm(jacobian, 2).item()
    assert 1 - 1e-9 <= found <= lf.certify(layer).bound * (1 + 1e-12)


def test_tokens_in_one_place_have_finite_derivatives() -> None:
    layer = steep(dtype=torch.float32)
    x = torch.zeros(1, 3, 2, requires_grad=True)
    out, jacobian = layer.forward_and_jacobian(x)
    (out.square().sum() + jacobian.square().sum()).backward()
    assert bool(torch.isfinite(x.grad).all())
    block = (2 / 3 * layer.slopes[0]).item()
    assert jacobian[0, 0, 0].item() == pytest.approx(block, rel=1e-5)


def test_far_tokens_in_half_precision_and_nan() -> None:
    """In float16 the square of 300 is infinite; NaN has no place among the knots."""
    layer = PairRadial()
    x = torch.tensor([[[300.0, 0.0], [-200.0, 100.0]]])
    half = PairRadial().half()
    half.load_state_dict(layer.state_dict())
    torch.testing.assert_close(half(x.half()).float(), layer(x), rtol=5e-3, atol=0.5)
    assert bool(torch.isfinite(half.forward_and_jacobian(x.half())[1]).all())
    assert bool(layer(x * torch.nan).isnan().all())


@pytest.mark.parametrize("norm", ["token", "linf", "self"])
def test_other_norms_are_refused(norm: str) -> None:
    with pytest.raises(lf.NotCertifiable, match="l2"):
        lf.certify(PairRadial(), norm=norm)


@pytest.mark.parametrize(("options", "message"), [({"knots": 1}, "knots"), ({"reach": 0.0}, "reach")])
def test_bad_arguments(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PairRadial(**options)
    with pytest.raises(ValueError, match=r"\(B, n, d\)"):
        PairRadial()(torch.zeros(3, 2))
