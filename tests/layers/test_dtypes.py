"""Promises in every dtype, of the weights and factors that a layer really multiplies by."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.certificate import Ask
from lipformer.functional.rounding import multiply_down, running, subnormal
from lipformer.layers.attention.bound import attention_bound
from lipformer.layers.spectral import rounding_margin
from tests.layers.battery import dense_jacobians, largest_gain, starting_inputs
from tests.oracles import dense_jacobian

HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32, torch.float64)
SIZES = [10.0**e for e in range(-8, 7)]
D, H, N = 8, 2, 4
EXACT = 1.0 + 1e-12  # for the float64 of the test itself


def each_dtype(function: object) -> object:
    return pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])(function)


def norm_of(weight: Tensor) -> float:
    return torch.linalg.matrix_norm(weight.detach().double(), 2).item()


def raw_weights(rows: int, columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of which rounding moves all entries alike, none, or most below the range of float16."""
    least = torch.full((rows, columns), subnormal(dtype), dtype=torch.float64).to(dtype)
    return {
        "even": torch.ones(rows, columns, dtype=dtype),
        "random": torch.randn(rows, columns).to(dtype),
        "large": (1e3 * torch.randn(rows, columns)).to(dtype),
        "smallest": least,
    }


@each_dtype
def test_a_product_never_exceeds_its_factor(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    value = torch.cat([torch.rand(500) + 1.0, 1.0 + torch.arange(200) * info.eps]).to(dtype)
    for exponent in torch.arange(-60.0, 8.0, 0.37).double():
        factor = 10.0**exponent
        got = multiply_down(value, factor).double()
        exact = factor * value.double()
        spare = torch.where(exact < info.tiny, subnormal(dtype) / 2.0, 0.0)
        assert bool(((got <= exact + spare) | ~torch.isfinite(got)).all()), factor
        if 2.0 * info.tiny < factor < info.max / 4.0:
            assert bool((got >= exact * (1.0 - 3.0 * info.eps)).all()), factor


def test_a_factor_keeps_its_gradient() -> None:
    value = torch.randn(3, dtype=torch.float16, requires_grad=True)
    factor = torch.tensor(1e-6, dtype=torch.float64, requires_grad=True)
    multiply_down(value, factor).sum().backward()
    assert factor.grad.item() == pytest.approx(value.sum().item(), rel=1e-2)
    assert value.grad.tolist() == pytest.approx([1e-6] * 3, rel=0.1)


@each_dtype
@pytest.mark.parametrize("mode", ["cap", "normalize"])
def test_bounded_weights(mode: str, dtype: torch.dtype) -> None:
    kept = 0
    for coeff in SIZES:
        layer = lf.SpectralLinear(48, 32, coeff=coeff, mode=mode)
        for name, raw in raw_weights(32, 48, dtype).items():
            layer.to(dtype).weight = raw
            least = rounding_margin(raw)[1]
            if coeff <= least:
                with pytest.raises(ValueError, match="cannot be kept by a weight of shape"):
                    layer.weight  # noqa: B018
                continue
            if not bool(torch.isfinite(layer.weight).all()):
                assert coeff > torch.finfo(dtype).max / 100
                continue
            norm = norm_of(layer.weight)
            assert norm <= coeff * EXACT, (name, coeff)
            kept += 1
            if mode == "normalize" and name == "random" and coeff > 100 * least:
                assert norm >= 0.9 * coeff
    assert kept >= 4 * 8


def test_a_weight_of_entries_below_the_range_of_float16() -> None:
    layer = lf.SpectralLinear(1024, 1024, coeff=1e-4, mode="normalize").half()
    layer.weight = torch.ones(1024, 1024, dtype=torch.float16)
    assert norm_of(layer.weight) <= 1e-4
    with pytest.raises(ValueError, match=r"a norm of 3e-05 cannot be kept .*\(1024, 1024\) in torch.fl"):
        lf.SpectralLinear(1024, 1024, coeff=3e-5, dtype=torch.float16)


@each_dtype
@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 2}, {"groups": 2}], ids=str)
def test_bounded_convolutions(options: dict[str, int], dtype: torch.dtype) -> None:
    for coeff in SIZES[::3]:
        conv = lf.spectral_bound(
            nn.Conv1d(4, 4, 3, bias=False, **options), coeff=coeff, mode="normalize"
        )
        for raw in raw_weights(4, 12 // conv.groups, dtype).values():
            conv.to(dtype).weight = raw.unflatten(1, (-1, 3))
            if coeff <= rounding_margin(conv.parametrizations.weight.original)[1]:
                continue
            plain = nn.Conv1d(4, 4, 3, bias=False, dtype=torch.float64, **options)
            plain.weight.data.copy_(conv.weight)
            dense = dense_jacobian(plain, torch.zeros(1, 4, 9, dtype=torch.float64))
            assert norm_of(dense) <= coeff * EXACT


def attention(dtype: torch.dtype, size: float, **options: object) -> lf.L2MultiheadAttention:
    """Weights whose bound is about ``size`` squared."""
    layer = lf.L2MultiheadAttention(D, H, batch_first=True, causal=True, max_len=N, **options).double()
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if "temperature" not in name:
                weight.copy_(size * torch.randn_like(weight))
    return layer.to(dtype).eval()


@each_dtype
@pytest.mark.parametrize("norm", ["l2", "token", "linf", "self"])
@pytest.mark.parametrize("value_proj", [False, True])
def test_heads_are_divided(value_proj: bool, norm: str, dtype: torch.dtype) -> None:
    """The bound of the very weights that run, factors among them, is at most the coefficient."""
    for size in (1e-7, 1e-4, 1e-2, 1.0, 30.0):
        inner = attention(dtype, size, value_proj=value_proj)
        for coeff in (1e-8, 1e-3, 0.9, 1e3):
            layer = lf.Contractive(inner, coeff, norm=norm)
            bound = attention_bound(inner, Ask(norm), layer.scales()).item()
            if math.isinf(bound):  # such factors leave the range of float16, and no output is finite
                assert layer.scales().max() > 1e4
                continue
            assert bound <= coeff * EXACT, (size, coeff)
            if size == 1.0 and coeff == 0.9:
                assert bound >= 0.15 * coeff


@each_dtype
@pytest.mark.parametrize("norm", ["l2", "token", "linf"])
def test_a_module_is_divided(norm: str, dtype: torch.dtype) -> None:
    for size in (1e-4, 1e-2, 1.0, 100.0):
        linears = [nn.Linear(D, D, bias=False) for _ in range(2)]
        for linear in linears:
            linear.weight.data.mul_(size)
        chain = nn.Sequential(linears[0], lf.Residual(attention(dtype, size)), linears[1]).to(dtype)
        layer = lf.Contractive(chain, 0.9, norm=norm)
        assert layer.scales().ndim == 0
        runs = lf.certify(lf.bake(chain).double(), norm=norm).bound
        assert layer.scales().item() * runs <= 0.9 * EXACT


def test_two_large_linear_maps_under_autocast() -> None:
    """x + f(x) with f of constant 0.9 keeps a tenth of x; the factor is 2e-7."""
    linears = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for linear, sign in zip(linears, (1.0, -1.0), strict=True):
        linear.weight.data.fill_(sign * 2050.0)
    block = lf.InvertibleResidual(nn.Sequential(*linears), coeff=0.9)
    x = torch.full((1, 1, 1), 1e-3)
    with torch.autocast("cpu", torch.float16):
        assert (block(x) / x).item() >= 0.1


FORMS = {
    "lean": {},
    "paper": {"value_proj": True},
    "rotary": {"positions": "rotary"},
    "alibi": {"positions": "alibi"},
    "bounded": {"proj_coeff": 0.5},
}


@each_dtype
@pytest.mark.parametrize("form", FORMS)
def test_a_baked_layer_multiplies_by_the_same_numbers(form: str, dtype: torch.dtype) -> None:
    for size in (1e-4, 1.0):
        inner = attention(dtype, size, **FORMS[form])
        x = torch.randn(2, N, D).to(dtype)
        for layer in (inner, lf.Contractive(inner)):
            out, baked = layer(x), lf.bake(layer)(x)
            same = (out[0], baked[0]) if layer is inner else (out, baked)
            assert torch.equal(*same)


@pytest.mark.parametrize("norm", ["l2", "token", "linf"])
@pytest.mark.parametrize("where", ["stored", "autocast"])
@pytest.mark.parametrize("half", HALF, ids=str)
def test_certificates_of_what_runs(half: torch.dtype, where: str, norm: str) -> None:
    """The dense float64 Jacobian of the layer with the weights that run, at structured inputs."""
    inner = attention(half if where == "stored" else torch.float32, 1.0, bias=False)
    for layer in (inner, lf.Contractive(inner, 0.9, norm=norm)):
        with torch.autocast("cpu", half, enabled=where == "autocast"):
            bound = lf.certify(layer, norm=norm).bound
        # Baked, the layer holds what it multiplies by; autocast rounds exactly that.
        runs = lf.bake(layer).to(half).double()
        x = starting_inputs(N, D).requires_grad_()
        out = runs(x)[0] if layer is inner else runs(x)
        assert largest_gain(dense_jacobians(out, x), norm, N) <= bound * EXACT
        if layer is inner or where == "autocast":
            assert bound == pytest.approx(lf.certify(runs, norm=norm).bound, rel=1e-9)
        else:
            assert bound == 0.9


@pytest.mark.parametrize("half", HALF, ids=str)
def test_autocast_changes_neither_weights_nor_factors(half: torch.dtype) -> None:
    bounded = lf.SpectralLinear(150, 150, coeff=0.7, mode="normalize")
    divided = [lf.Contractive(attention(torch.float32, 1.0), norm=n) for n in ("l2", "token", "linf")]
    weight, scales = bounded.weight, [layer.scales() for layer in divided]
    with torch.autocast("cpu", half):
        assert torch.equal(bounded.weight, weight)
        assert all(map(torch.equal, (layer.scales() for layer in divided), scales))
        assert running(weight).dtype == half
        assert running(weight.double()).dtype == torch.float64
    assert running(weight) is weight


def test_the_bounds_of_wide_layers_are_those_of_their_stored_weights() -> None:
    for dtype, rel in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        inner = attention(dtype, 1.0)
        for norm in ("l2", "token", "linf", "self"):
            stored = attention_bound(inner, Ask(norm, N, in_forward=True)).item()
            assert lf.certify(inner, norm=norm).bound == pytest.approx(stored, rel=4 * rel)


def test_a_bound_is_not_zero_where_no_weight_is() -> None:
    inner = attention(torch.float64, 1e-200)
    for norm in ("l2", "token", "linf", "self"):
        assert 0.0 < lf.certify(inner, norm=norm).bound < 1e-290
    with torch.no_grad():
        inner.out_proj.weight.zero_()
    assert lf.certify(inner).bound == 0.0


@each_dtype
def test_output_weights_of_zero(dtype: torch.dtype) -> None:
    """Nothing is rounded there, so that the bias keeps the coefficient."""
    inner = attention(dtype, 1.0)
    inner.out_proj.weight.data.zero_()
    layer = lf.Contractive(inner, 0.9)
    assert layer.scales().tolist() == pytest.approx([0.9, 0.9], rel=0.2)
    layer(torch.randn(1, N, D, dtype=dtype)).sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in layer.parameters())


def test_a_half_precision_copy_has_a_certificate_of_its_own() -> None:
    inner = attention(torch.float32, 1.0)
    for half in HALF:
        other = copy.deepcopy(inner).to(half)
        gap = abs(lf.certify(other).bound / lf.certify(inner).bound - 1.0)
        assert 0.0 < gap < 4 * math.sqrt(D) * torch.finfo(half).eps
