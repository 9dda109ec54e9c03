"""Weights of bounded spectral norm: SpectralLinear and the spectral_bound parametrization."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import lipformer as lf
from lipformer.functional.spectral.orthogonal import orthogonalised
from tests.layers.battery import CertifiedLayer, slow_compile
from tests.oracles import dense_jacobian


class TestSpectralLinearCap(CertifiedLayer):
    least = 0.99

    def make(self) -> nn.Module:
        return lf.SpectralLinear(8, 8, coeff=0.5)


class TestSpectralLinearNormalize(CertifiedLayer):
    least = 0.99

    def make(self) -> nn.Module:
        return lf.SpectralLinear(8, 6, coeff=2.0, mode="normalize")

    test_compile = slow_compile


class TestSpectralLinearOrthogonal(CertifiedLayer):
    least = 0.99

    def make(self) -> nn.Module:
        return lf.SpectralLinear(8, 6, coeff=2.0, mode="orthogonal")

    test_compile = slow_compile


class TestSpectralBoundOnLinear(CertifiedLayer):
    least = 0.99

    def make(self) -> nn.Module:
        return lf.spectral_bound(nn.Linear(8, 12), coeff=0.3)

    test_compile = slow_compile


class TestSpectralBoundOnConv1d(CertifiedLayer):
    tokens = (4, 9)  # channels and pixels
    norms = ("l2", "linf")
    least = 0.3

    def make(self) -> nn.Module:
        return lf.spectral_bound(nn.Conv1d(4, 6, 3, padding=1, groups=2), coeff=0.8, mode="normalize")


class TestSpectralBoundOnConv2d(CertifiedLayer):
    tokens = (2, 5, 4)
    norms = ("l2", "linf")
    least = 0.3

    def make(self) -> nn.Module:
        return lf.spectral_bound(nn.Conv2d(2, 3, 3, padding=1, stride=2), coeff=0.8)

    def starts(self, module: nn.Module) -> Tensor:
        return torch.randn(2, *self.tokens, dtype=torch.float64)  # it is linear

    test_compile = slow_compile


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["cap", "normalize", "orthogonal"])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_the_norm_is_bounded_for_weights_of_any_size(size: float, mode: str, dtype: torch.dtype) -> None:
    layer = lf.SpectralLinear(40, 24, coeff=0.7, mode=mode, dtype=dtype)
    with torch.no_grad():
        layer.parametrizations.weight.original.copy_(size * torch.randn(24, 40))
    norm = torch.linalg.matrix_norm(layer.weight.double(), 2).item()
    assert norm <= 0.7  # the stored weight, with no tolerance
    if mode != "cap" or size >= 1:
        slack = 0.9 if dtype == torch.bfloat16 else 0.99
        assert norm >= slack * 0.7
    else:
        assert torch.equal(layer.weight, layer.parametrizations.weight.original)


def test_a_zero_weight_stays_zero() -> None:
    for mode in ("cap", "normalize", "orthogonal"):
        layer = lf.SpectralLinear(4, 4, mode=mode, bias=False)
        with torch.no_grad():
            layer.parametrizations.weight.original.zero_()
        layer(torch.ones(1, 4)).sum().backward()
        assert torch.equal(layer.weight, torch.zeros(4, 4))
        assert bool(torch.isfinite(layer.parametrizations.weight.original.grad).all())


def test_orthogonal_start_with_the_norm_asked_for() -> None:
    layer = lf.SpectralLinear(16, 16, coeff=0.5)
    singular = torch.linalg.svdvals(layer.weight)
    torch.testing.assert_close(singular, torch.full((16,), 0.5), rtol=1e-4, atol=0)
    assert torch.equal(layer.bias, torch.zeros(16))


@pytest.mark.parametrize("mode", ["cap", "normalize", "orthogonal"])
def test_gradient_flows_through_the_bound(mode: str) -> None:
    layer = lf.SpectralLinear(3, 4, coeff=0.5, mode=mode, bias=False).double()
    raw = (2 * torch.randn(4, 3, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(layer.parametrizations.weight[0], (raw,))
    assert torch.autograd.gradgradcheck(orthogonalised, (raw,))


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (3, 5, 9)], ids=str)
def test_singular_values_are_drawn_together(shape: tuple[int, ...]) -> None:
    weight = 30.0 * torch.randn(shape, dtype=torch.float64)
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    drawn = values / values.pow(8).sum(-1, keepdim=True).pow(1 / 8)
    for _ in range(6):
        drawn = 1.5 * drawn - 0.5 * drawn**3
    found = orthogonalised(weight)
    torch.testing.assert_close(found, left @ torch.diag_embed(drawn) @ right, rtol=1e-10, atol=1e-10)
    assert drawn.min() > 0.7
    assert values.min() < 0.4 * values.max()
    outside = orthogonalised(weight.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(orthogonalised(weight.float()), outside)


def test_orthogonal_weights_need_a_matrix() -> None:
    with pytest.raises(ValueError, match=r"needs a matrix, got shape \(3, 2, 3, 3\)"):
        lf.spectral_bound(nn.Conv2d(2, 3, 3), mode="orthogonal")


@pytest.mark.parametrize(
    "options",
    [
        {"padding": 1},
        {"padding": 2, "dilation": 2},
        {"stride": 2},
        {"padding": 1, "groups": 2},
        {"padding": 1, "padding_mode": "circular"},
    ],
    ids=str,
)
def test_bounded_convolution(options: dict[str, object]) -> None:
    conv = lf.spectral_bound(nn.Conv1d(4, 4, 3, bias=False, **options), coeff=0.6, mode="normalize")
    conv = conv.double()
    dense = dense_jacobian(conv, torch.zeros(1, 4, 12, dtype=torch.float64))
    assert torch.linalg.matrix_norm(dense, 2).item() <= 0.6
    assert lf.certify(conv).bound == pytest.approx(0.6, rel=1e-6)


def test_frozen_computes_the_weight_once() -> None:
    layer = lf.SpectralLinear(8, 8)
    with lf.frozen(layer):
        assert layer.weight is layer.weight
        with lf.frozen(layer):
            pass
    assert layer.weight is not layer.weight
    before = layer.weight
    with torch.no_grad():
        layer.parametrizations.weight.original.mul_(-1)
    assert torch.equal(layer.weight, -before)


@pytest.mark.parametrize("quietly", [torch.no_grad, torch.inference_mode])
def test_a_freeze_begun_without_gradients_does_not_silence_them(quietly: Any) -> None:
    layer = lf.SpectralLinear(4, 4)
    with lf.frozen(layer):
        with quietly():
            first = layer.weight
        layer(torch.ones(1, 4)).sum().backward()
        torch.testing.assert_close(first.clone(), layer.weight.detach())
    assert layer.parametrizations.weight.original.grad.abs().max() > 0


def test_frozen_leaves_other_modules_alone() -> None:
    one, other = lf.SpectralLinear(4, 4), lf.SpectralLinear(4, 4)
    with lf.frozen(one):
        before = other.weight.clone()
        with torch.no_grad():
            other.parametrizations.weight.original.mul_(-1)
        assert torch.equal(other.weight, -before)


def test_reset_parameters_draws_new_weights() -> None:
    layer = lf.SpectralLinear(8, 8, coeff=0.5)
    before = layer.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.weight, before)
    assert torch.linalg.svdvals(layer.weight).min().item() == pytest.approx(0.5, rel=1e-4)


def test_assignment_stores_the_raw_weight() -> None:
    layer = lf.SpectralLinear(2, 2, coeff=1.0)
    layer.weight = 3 * torch.eye(2)
    assert torch.equal(layer.parametrizations.weight.original, 3 * torch.eye(2))
    torch.testing.assert_close(layer.weight, torch.eye(2), rtol=1e-5, atol=0)


def test_baking_leaves_the_parametrizations_of_others() -> None:
    layer = parametrize.register_parametrization(nn.Linear(4, 4), "weight", nn.Tanh())
    baked = lf.bake(nn.Sequential(layer, lf.SpectralLinear(4, 4)))
    assert parametrize.is_parametrized(baked[0])
    assert type(baked[1]) is nn.Linear
    assert type(lf.SpectralLinear(4, 4).bake()) is nn.Linear


def test_the_module_itself_is_not_baked() -> None:
    layer = lf.SpectralLinear(4, 4)
    before = copy.deepcopy(layer.state_dict())
    lf.bake(layer)
    assert parametrize.is_parametrized(layer)
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


def test_copies_of_one_layer_are_baked_each() -> None:
    """As nn.TransformerEncoder copies its layer: copies share the class that torch made for them."""
    layer = lf.spectral_bound(nn.Linear(4, 4), coeff=0.5)
    model, x = nn.Sequential(layer, copy.deepcopy(layer)), torch.randn(3, 4)
    baked = lf.bake(model)
    torch.testing.assert_close(baked(x), model(x))
    assert not any(parametrize.is_parametrized(part) for part in baked.modules())


@pytest.mark.parametrize(("coeff", "mode"), [(0.0, "cap"), (float("nan"), "cap"), (1.0, "clip")])
def test_bad_arguments_are_named(coeff: float, mode: str) -> None:
    layer = lf.SpectralLinear(2, 2)
    for later in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="coeff must be positive and finite, got"):
            layer.coeff = later
    assert layer.coeff == 1.0
    layer.coeff = 0.5
    assert lf.certify(layer).bound == 0.5
    with pytest.raises(ValueError, match="coeff must be positive and finite|orthogonal, got 'clip'"):
        lf.SpectralLinear(2, 2, coeff=coeff, mode=mode)


def test_settings_of_a_bounded_convolution_changed_later() -> None:
    conv = lf.spectral_bound(nn.Conv1d(1, 1, 3, stride=3, bias=False), mode="normalize")
    for module in (conv, copy.deepcopy(conv)):
        module.weight = torch.ones(1, 1, 3)
        module.stride = (1,)
        dense = dense_jacobian(module, torch.zeros(1, 1, 30))
        assert 0.9 <= torch.linalg.matrix_norm(dense, 2).item() <= 1.0
    copied = copy.deepcopy(conv)
    copied.stride = (3,)
    assert not torch.equal(copied.weight, conv.weight)
    conv.padding_mode = "reflect"
    with pytest.raises(ValueError, match="padding_mode='reflect'"):
        conv.weight  # noqa: B018


def test_torchs_cache_of_parametrizations_is_refused() -> None:
    layer = lf.SpectralLinear(4, 4)
    with parametrize.cached(), pytest.raises(RuntimeError, match=r"use lipformer.frozen\(module\)"):
        layer(torch.ones(1, 4))
    assert layer(torch.ones(1, 4)).shape == (1, 4)


class Doubled(lf.SpectralLinear):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


class DoubledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


def test_baking_refuses_a_forward_of_its_own_or_keeps_it() -> None:
    hooked, replaced = lf.SpectralLinear(4, 4), lf.SpectralLinear(4, 4)
    hooked.register_forward_hook(lambda module, args, out: 2.0 * out)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    for layer in (Doubled(4, 4), hooked, replaced):
        with pytest.raises(TypeError, match="cannot be baked: "):
            lf.bake(nn.Sequential(layer))
    kept, x = lf.spectral_bound(DoubledLinear(4, 4), coeff=0.1), torch.randn(2, 4)
    assert torch.equal(lf.bake(kept)(x), kept(x))
    assert not parametrize.is_parametrized(lf.bake(kept))


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_empty_weights(shape: tuple[int, int]) -> None:
    layer = lf.SpectralLinear(*shape)
    assert layer(torch.ones(2, shape[0])).shape == (2, shape[1])
    assert lf.certify(layer).bound <= 1.0
