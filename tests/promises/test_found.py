"""The function that is bounded is the function that runs: every case in which it once was not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import lipformer as lf
from lipformer.analysis import (
    ball_bound,
    certified_radius,
    local_bound,
    lofast_bound,
    perturbation_bound,
)
from lipformer.certificate import Bound
from lipformer.certificate.bounds import product_up
from lipformer.models import DotProductSelfAttention
from lipformer.models.vision_transformer import Positions

torch.manual_seed(0)
RESHAPED = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (64, 2)))


def attention(**options: Any) -> lf.L2MultiheadAttention:
    return lf.L2MultiheadAttention(2, 1, **{"batch_first": True, **options}).double()


# 1: the number of tokens, behind whatever changed it.


@pytest.mark.parametrize(
    "before",
    [
        RESHAPED,
        nn.Sequential(nn.Identity(), nn.Sequential(RESHAPED)),
        lf.layers.scaled.Scaled(RESHAPED, torch.tensor(1.0, dtype=torch.float64)),
        lf.layers.scaled.FirstOutput(RESHAPED),
        lf.Contractive(RESHAPED, 1.0, norm="l2"),
        lf.ConvexResidual(RESHAPED),
    ],
    ids=lambda before: type(before).__name__,
)
def test_tokens_made_on_the_way(before: nn.Module) -> None:
    model = nn.Sequential(before, attention())
    with pytest.raises(lf.NotCertifiable, match="number of tokens"):
        lf.certify(model, seq_len=2)
    with pytest.raises(lf.NotCertifiable):
        lf.Contractive(model, seq_len=None)
    limited = nn.Sequential(before, attention(max_len=64))
    assert lf.certify(limited, seq_len=2).bound == pytest.approx(lf.certify(limited[1]).bound)


def test_a_rule_says_how_many_tokens_come_out() -> None:
    class Repeat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.repeat_interleave(4, dim=1)

    @lf.register_bound(Repeat)
    def _(module: Repeat, ask: Any) -> Bound:
        return Bound(2.0, tokens=None if ask.seq_len is None else 4 * ask.seq_len)

    layer = attention()
    model = nn.Sequential(nn.Sequential(Repeat()), layer)
    assert lf.certify(model, seq_len=3).bound == pytest.approx(2 * lf.certify(layer, seq_len=12).bound)


# 2: weights as they are multiplied by.


def test_radius_of_a_low_precision_model_is_that_of_its_weights() -> None:
    torch.manual_seed(1)
    layers = [lf.SpectralLinear(48, 48, mode="normalize") for _ in range(8)]
    model = nn.Sequential(*layers, lf.SpectralLinear(48, 3)).bfloat16()
    x = torch.randn(64, 48)
    weights = [layer.weight.double() for layer in model]
    logits = x.double()
    for weight, layer in zip(weights, model, strict=True):
        logits = logits @ weight.mT + layer.bias.double()
    label = logits.argmax(1)
    radius = certified_radius(model, x, label)
    assert (radius > 0).all()
    # Towards the nearest other label of the linear map that these weights are.
    whole = torch.linalg.multi_dot(weights[::-1])
    for i in range(64):
        others = [j for j in range(3) if j != label[i]]
        true = min(
            (logits[i, label[i]] - logits[i, j]) / (whole[label[i]] - whole[j]).norm() for j in others
        )
        assert radius[i] <= true
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(lf.NotCertifiable, match="autocast"):
        certified_radius(model.float(), x, label)


def test_parametrized_weights_are_widened_not_derived_again() -> None:
    layer = parametrizations.weight_norm(nn.Linear(8, 8, bias=False)).bfloat16()
    with torch.no_grad():
        layer.parametrizations.weight.original0.mul_(1.7)
    x = torch.randn(2, 8)
    y, _ = perturbation_bound(layer, x.double(), 0.1)
    torch.testing.assert_close(y, x.double() @ layer.weight.detach().double().mT)


def test_a_bounded_weight_that_something_else_changes_is_measured() -> None:
    class Loud(lf.layers.spectral.SpectralBound):
        def scaled(self, weight: Tensor, factor: Tensor) -> Tensor:
            return 10 * super().scaled(weight, factor)

    hooked_bound, loud = lf.SpectralLinear(4, 4), nn.Linear(4, 4)
    hooked_bound.parametrizations.weight.register_forward_hook(lambda module, args, out: 10 * out)
    parametrize.register_parametrization(loud, "weight", Loud())
    for layer in (hooked_bound, loud):
        assert lf.certify(layer).bound >= 0.99 * torch.linalg.matrix_norm(layer.weight, 2).item() > 1.5


def test_maps_have_the_weights_that_run() -> None:
    layer = DotProductSelfAttention(8, 2, logit_coeff=1.0, value_coeff=1.0).bfloat16()
    with torch.no_grad():
        weight = layer.v_proj.weight.double().T.unflatten(1, (2, 4)).transpose(0, 1)
        out = layer.out_proj.weight.double().T.unflatten(0, (2, 4))
        torch.testing.assert_close(lf.analysis.attention_maps(layer).values, weight @ out)


# 5: samples that influence each other.

MIXING = {
    "tokens second": (lambda: attention(batch_first=False), (3, 4, 2)),
    "in a wrapper": (lambda: lf.Contractive(attention(batch_first=False), seq_len=4), (3, 4, 2)),
    "no batch": (lambda: attention(), (3, 2)),
    "no batch behind a reshape": (
        lambda: lf.Contractive(nn.Sequential(nn.Flatten(), attention(max_len=9)), norm="l2"),
        (3, 2, 1),
    ),
    "encoder layer": (lambda: encoder(batch_first=False), (3, 4, 2)),
    "shift without a batch": (lambda: lf.TokenShift(2), (3, 2)),
    "softmax of samples": (lambda: nn.Softmax(0), (3, 4)),
    "softmax of samples from behind": (lambda: nn.Softmax(-2), (3, 4)),
    "flattened samples": (lambda: nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (3, 4))), (3, 4)),
    "normed samples": (lambda: nn.LayerNorm((3, 4), elementwise_affine=False), (3, 4)),
    "convolved samples": (lambda: nn.Conv1d(3, 3, 1), (3, 4)),
}


def encoder(**options: Any) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(2, 1, 4, 0.0, **options)
    layer.self_attn = attention(**options)
    return layer.double()


@pytest.mark.parametrize("name", MIXING)
def test_samples_that_influence_each_other(name: str) -> None:
    make, shape = MIXING[name]
    with pytest.raises(lf.NotCertifiable, match=r"samples|first dimension"):
        perturbation_bound(make().double(), torch.randn(shape, dtype=torch.float64), 0.1)


def test_samples_that_do_not_stay_certified() -> None:
    x = torch.randn(3, 4, 2, dtype=torch.float64)
    inside = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (4, 2)), attention(max_len=4))
    kept = [
        attention(),
        encoder(batch_first=True),
        nn.Softmax(-2),
        nn.Flatten(-2),
        nn.LayerNorm((4, 2)).double(),
        nn.Conv1d(4, 4, 1).double(),
        lf.TokenShift(2),
        lf.Contractive(inside, norm="l2"),
        lf.Contractive(nn.Sequential(nn.Conv1d(4, 4, 1), nn.ReLU(), nn.Conv1d(4, 4, 1)).double()),
    ]
    for module in kept:
        y, moved = perturbation_bound(module, x, 0.1)
        assert torch.isfinite(moved).all()
        alone = torch.cat([perturbation_bound(module, x[i : i + 1], 0.1)[0] for i in range(3)])
        torch.testing.assert_close(y, alone)


# 6 and 7: hooks, forwards and helpers that are not those of the class.


class Loud(nn.MultiheadAttention):
    def forward(self, *args: Any, **options: Any) -> Any:
        out, weights = super().forward(*args, **options)
        return 10 * out, weights


class LoudMaps(DotProductSelfAttention):
    def forward(self, x: Tensor) -> Tensor:
        return 10 * super().forward(x)


class LoudMerge(nn.MultiheadAttention):
    def merge_masks(self, *args: Any) -> Any:
        return super().merge_masks(*args)


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, out: out)
    return module


BOUNDS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "ball": lambda layer, x: ball_bound(layer, 4, 1.0),
    "mean field": lambda layer, x: lf.analysis.mean_field_bound(layer, 1.0),
    "local": local_bound,
    "lofast": lambda layer, x: lofast_bound(layer, x, 0.1),
    "split": lambda layer, x: lf.analysis.split_gain(layer, x[0], torch.ones(4)),
    "perturbation": lambda layer, x: perturbation_bound(layer, x, 0.1),
}


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(
    "layer",
    [
        Loud(4, 2, batch_first=True),
        LoudMerge(4, 2, batch_first=True),
        LoudMaps(4, 2),
        hooked(nn.MultiheadAttention(4, 2, batch_first=True)),
        hooked(DotProductSelfAttention(4, 2)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_attention_of_another_forward(layer: nn.Module, bound: str) -> None:
    with pytest.raises(lf.NotCertifiable, match=r"overrides the|hook"):
        BOUNDS[bound](layer, torch.randn(2, 4, 4))


class LoudConv(nn.Conv2d):
    def _conv_forward(self, *args: Any) -> Tensor:
        return 10 * super()._conv_forward(*args)


class LoudFeedForward(nn.TransformerEncoderLayer):
    def _ff_block(self, x: Tensor) -> Tensor:
        return 10 * super()._ff_block(x)


class LoudSelfAttention(nn.TransformerEncoderLayer):
    def _sa_block(self, *args: Any, **options: Any) -> Tensor:
        return 10 * super()._sa_block(*args, **options)


class LoudCall(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return 10 * super().__call__(x)


class Backwards(nn.Sequential):
    def __iter__(self) -> Iterator[nn.Module]:
        return iter([self[0]] * 3)


class LoudMatrix(lf.L2MultiheadAttention):
    def output_matrix(self) -> Tensor:
        return 10 * super().output_matrix()


class LoudMix(lf.Residual):
    def mix(self, x: Tensor, out: Tensor) -> Tensor:
        return 10 * super().mix(x, out)


class LoudScales(lf.Contractive):
    def scales(self) -> Tensor:
        return 10 * super().scales()


def loud_on_the_instance() -> nn.Module:
    conv = nn.Conv2d(2, 2, 1)
    conv._conv_forward = lambda *args: 10 * nn.Conv2d._conv_forward(conv, *args)
    return conv


def with_attention(layer: nn.TransformerEncoderLayer) -> nn.TransformerEncoderLayer:
    layer.self_attn = lf.L2MultiheadAttention(4, 2, batch_first=True)
    return layer.eval()


@pytest.mark.parametrize(
    "module",
    [
        LoudConv(2, 2, 1),
        loud_on_the_instance(),
        with_attention(LoudFeedForward(4, 2, 8, batch_first=True)),
        with_attention(LoudSelfAttention(4, 2, 8, batch_first=True)),
        LoudCall(2, 2),
        Backwards(nn.Linear(2, 2)),
        LoudMatrix(4, 2),
        LoudMix(nn.Linear(2, 2)),
        LoudScales(nn.Linear(2, 2)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_overridden_helpers(module: nn.Module) -> None:
    with pytest.raises(lf.NotCertifiable, match="overrides the"):
        lf.certify(module, seq_len=4)
    with pytest.raises(lf.NotCertifiable, match="overrides the"):
        lf.Contractive(module, seq_len=4)


def test_a_class_changed_after_its_rule_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 10 * forward(self, x))
    with pytest.raises(lf.NotCertifiable, match="overrides the forward"):
        lf.certify(nn.Linear(2, 2))


def test_methods_that_the_function_does_not_run_are_free() -> None:
    class Named(nn.Conv2d):
        def extra_repr(self) -> str:
            return "named"

        def reset_parameters(self) -> None:
            nn.init.zeros_(self.weight)

        def train(self, mode: bool = True) -> Named:
            return super().train(mode)

    assert lf.certify(Named(2, 2, 1, bias=False)).bound == 0.0


@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
    ],
)
def test_global_hooks(register: Callable[..., Any]) -> None:
    handle = register(lambda *args: None)
    try:
        with pytest.raises(lf.NotCertifiable, match="hook"):
            lf.certify(nn.Linear(2, 2))
    finally:
        handle.remove()
    assert lf.certify(nn.Linear(2, 2)).bound > 0


# 8: factors whose product leaves the range of floats on the way.


def number(value: float, dtype: torch.dtype = torch.float64) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.constant_(linear.weight, value)
    return linear


@pytest.mark.parametrize(
    ("factors", "dtype"),
    [
        ((1e-200, 1e-200, 1e200, 1e200), torch.float64),
        ((1e200, 1e200, 1e-200, 1e-200), torch.float64),
        ((1e-38,) * 9 + (1e38,) * 9, torch.float32),
    ],
)
def test_products_out_of_range_on_the_way(factors: tuple[float, ...], dtype: torch.dtype) -> None:
    model = nn.Sequential(*(number(value, dtype) for value in factors))
    assert lf.certify(model).bound == pytest.approx(1.0, rel=1e-5)
    assert lf.certify(model).bound >= 1.0 or dtype == torch.float32
    nested = nn.Sequential(nn.Sequential(*model[: len(model) // 2]), *model[len(model) // 2 :])
    if factors[0] < 1:
        assert lf.certify(nested).bound >= 0.99
    else:
        with pytest.raises(lf.NotCertifiable, match="bound is inf"):
            lf.certify(nested)
    x = torch.zeros(1, 1, dtype=dtype)
    assert perturbation_bound(model, x, 0.5)[1] >= 0.49
    if factors[0] < 1:
        # Divided by what is at least its constant, however that was found.
        assert lf.Contractive(model, 0.5)(x + 0.25).abs() <= 0.125 * 1.00001


def test_a_product_is_zero_only_with_a_zero() -> None:
    assert product_up([1e-200, 1e-200]) > 0
    assert product_up([1e-200, 0.0, 1e-200]) == 0.0
    assert product_up([torch.tensor(1e-200).double(), torch.tensor(1e-200).double()]) > 0
    assert product_up([0.5, 1.0, 2.0]) == pytest.approx(1.0, rel=1e-14)
    assert product_up([1.0, 3.0]) == 3.0
    assert product_up([1e200, 1e200]) == float("inf")
    values = torch.rand(6, dtype=torch.float64)
    exact = values.prod().item()
    for given in (values.tolist(), list(values), [values[0], *values[1:].tolist()]):
        assert exact <= float(product_up(given)) <= exact * (1 + 1e-13)


# 9: what was changed after a module was built.


def test_a_residual_weight_beyond_one() -> None:
    layer = lf.ConvexResidual(nn.Linear(2, 2, bias=False, dtype=torch.float64))
    nn.init.eye_(layer.branch.weight)
    layer.branch.weight.data.neg_()
    layer.weight = 1.6
    x = torch.zeros(1, 2, 2, dtype=torch.float64)
    assert perturbation_bound(layer, x, 1.0)[1] >= 2.2
    assert lf.certify(layer).bound >= 2.2


def test_positions_do_not_repeat_a_token() -> None:
    assert Positions(4, 2, 0.1)(torch.zeros(1, 1, 2)).shape == (1, 1, 2)
    with pytest.raises(ValueError, match=r"\(B, N <= 4, 2\), got \(1, 5, 2\)"):
        Positions(4, 2, 0.1)(torch.zeros(1, 5, 2))


def test_copies_are_as_faithful() -> None:
    assert lf.certify(copy.deepcopy(attention(max_len=4))).bound > 0


# 16: what is not there, or not real.


@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.Linear(4, 0),
        lambda: nn.Linear(0, 4, bias=False),
        lambda: nn.Conv1d(0, 4, 1),
        lambda: nn.LayerNorm(0),
        lambda: nn.PReLU(0),
        lambda: nn.BatchNorm1d(0).eval(),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_empty_weights_have_a_bound(module: Callable[[], nn.Module], norm: str) -> None:
    assert 0.0 <= lf.certify(module(), norm=norm).bound <= 1.0


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize(
    ("module", "what"),
    [
        (lambda: nn.LazyLinear(2), "no values yet"),
        (lambda: nn.Linear(2, 2, device="meta"), "no values yet"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "complex64"),
        (lambda: nn.Linear(2, 2).to(torch.float8_e4m3fn), "float8"),
    ],
)
def test_weights_that_are_no_numbers(module: Callable[[], nn.Module], what: str) -> None:
    with pytest.raises(lf.NotCertifiable, match=what):
        lf.certify(nn.Sequential(module()))


def test_slopes_and_lengths_out_of_range() -> None:
    with pytest.raises(ValueError, match="at least 1e-30.*got slope=1e-320"):
        lf.functional.l2_gain(64, is_causal=True, slope=1e-320)
    with pytest.raises(ValueError, match="integer >= 1"):
        lf.functional.l2_gain(10**400)
