"""The invertible linear map and the permutation of features."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lipformer as lf
from lipformer.flows import ActNorm, InvertibleLinear, Permutation
from lipformer.flows.linear import TokenWise
from tests.layers.battery import CertifiedLayer, WithoutParameters, saved, scrambled
from tests.oracles import dense_jacobian

KINDS = [ActNorm, InvertibleLinear, Permutation]


class TestInvertibleLinear(CertifiedLayer):
    least = 0.9

    def make(self) -> nn.Module:
        return InvertibleLinear(8)


class TestPermutation(WithoutParameters):
    least = 0.9
    # Two permutations differ, but not by parameters: the test takes equal weights for granted.
    test_functional_call = None  # type: ignore[assignment]

    def make(self) -> nn.Module:
        return Permutation(8)


def made(kind: type[TokenWise], dim: int = 4) -> nn.Module:
    return scrambled(kind(dim).double().eval(), 0.5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
def test_round_trip_and_log_det_are_those_of_the_jacobian(kind: type[TokenWise], scale: float) -> None:
    layer = made(kind)
    x = scale * torch.randn(3, 5, 4, dtype=torch.float64)
    y, log_det = layer.forward_and_log_det(x)
    back, back_log_det = layer.inverse_and_log_det(y)
    assert (back - x).abs().max() <= 1e-11 * scale
    assert log_det.shape == (3,)
    torch.testing.assert_close(back_log_det, -log_det, rtol=0, atol=0)
    for b in range(3):
        jacobian = dense_jacobian(layer, x[b : b + 1])
        torch.testing.assert_close(log_det[b], torch.linalg.slogdet(jacobian)[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_padded_tokens_pass_and_do_not_count(kind: type[TokenWise]) -> None:
    layer = made(kind)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    padded = torch.zeros(2, 5, dtype=torch.bool)
    padded[1, 2:] = True
    y, log_det = layer.forward_and_log_det(x, padded)
    whole, short = layer.forward_and_log_det(x[:1]), layer.forward_and_log_det(x[1:, :2])
    assert torch.equal(y[1, 2:], x[1, 2:])
    torch.testing.assert_close(y[1, :2], short[0][0])
    torch.testing.assert_close(log_det, torch.cat([whole[1], short[1]]))
    torch.testing.assert_close(layer.inverse(y, padded), x)


def test_it_starts_as_a_rotation() -> None:
    weight = InvertibleLinear(6).weight().double()
    torch.testing.assert_close(weight @ weight.mT, torch.eye(6).double(), rtol=0, atol=1e-5)


def test_after_steps_the_determinant_follows() -> None:
    layer = InvertibleLinear(5).double()
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.05)
    x = torch.randn(8, 3, 5, dtype=torch.float64)
    start = layer.token_log_det().item()
    for _ in range(20):
        y, log_det = layer.forward_and_log_det(x)
        optimiser.zero_grad()
        (0.5 * y.square().sum((1, 2)) - log_det).mean().backward()
        optimiser.step()
    expected = torch.linalg.slogdet(layer.weight())[1]
    torch.testing.assert_close(layer.token_log_det(), expected, rtol=1e-12, atol=1e-12)
    assert abs(layer.token_log_det().item() - start) > 1e-3
    assert (layer.inverse(layer(x)) - x).abs().max() <= 1e-11


def test_gradients_of_the_inverse() -> None:
    layer = InvertibleLinear(3).double()
    y = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer.inverse, (y,))


def test_a_permutation_is_saved_and_seeded() -> None:
    layer = Permutation(9, torch.Generator().manual_seed(3))
    assert torch.equal(layer.order, Permutation(9, torch.Generator().manual_seed(3)).order)
    other = Permutation(9)
    other.load_state_dict(saved(layer))
    x = torch.randn(2, 3, 9)
    assert torch.equal(other(x), layer(x))
    assert lf.certify(layer).bound == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip_in_low_precision(dtype: torch.dtype) -> None:
    layer, x = InvertibleLinear(16).to(dtype), torch.randn(4, 9, 16, dtype=dtype)
    assert (layer.inverse(layer(x)) - x).abs().max() <= (1e-5 if dtype == torch.float32 else 0.1)


def test_autocast_does_not_round_a_density() -> None:
    layer, x = InvertibleLinear(4), torch.randn(2, 3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = layer(x)
    assert torch.equal(rounded, layer(x))
