"""certify's rules for torch's own layers, against dense Jacobians and SciPy."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import scipy.optimize  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn

import lipformer as lf
from tests.oracles import dense_jacobian, gains


def l2_gain_of(module: nn.Module, x: Tensor) -> float:
    return torch.linalg.matrix_norm(dense_jacobian(module, x).double(), 2).item()


# Activations: (module, where to look for the largest slope).
ACTIVATIONS: list[tuple[nn.Module, tuple[float, float]]] = [
    (nn.Identity(), (-3, 3)),
    (nn.ReLU(), (-3, 3)),
    (nn.ReLU6(), (-3, 8)),
    (nn.LeakyReLU(0.1), (-3, 3)),
    (nn.LeakyReLU(-2.5), (-3, 3)),
    (nn.PReLU(init=1.7), (-3, 3)),
    (nn.ELU(), (-3, 3)),
    (nn.ELU(alpha=2.5), (-3, 3)),
    (nn.CELU(alpha=0.3), (-3, 3)),
    (nn.SELU(), (-3, 3)),
    (nn.GELU(), (0, 3)),
    (nn.GELU(approximate="tanh"), (0, 3)),
    (nn.SiLU(), (0, 6)),
    (nn.Mish(), (0, 6)),
    (nn.Hardswish(), (-4, 4)),
    (nn.Tanh(), (-3, 3)),
    (nn.Hardtanh(-2.0, 0.5), (-3, 3)),
    (nn.Tanhshrink(), (-20, 20)),
    (nn.Softsign(), (-3, 3)),
    (nn.Softplus(), (-3, 30)),
    (nn.Softplus(beta=3.0), (-3, 30)),
    (nn.LogSigmoid(), (-40, 3)),
    (nn.Softshrink(), (-3, 3)),
    (nn.Sigmoid(), (-3, 3)),
    (nn.Hardsigmoid(), (-4, 4)),
    (lf.LipSwish(), (0, 6)),
]


@pytest.mark.parametrize(("module", "interval"), ACTIVATIONS, ids=lambda v: repr(v))
def test_activation_slopes(module: nn.Module, interval: tuple[float, float]) -> None:
    """The bound is the largest slope: never below it, and at most 2e-6 above."""
    module = module.double()

    def slope(x: float) -> float:
        point = torch.tensor([x], dtype=torch.float64, requires_grad=True)
        return abs(torch.autograd.grad(module(point).sum(), point)[0].item())

    x = torch.linspace(*interval, 20001, dtype=torch.float64, requires_grad=True)
    slopes = torch.autograd.grad(module(x).sum(), x)[0].abs()
    best = x[slopes.argmax()].item()
    step = (interval[1] - interval[0]) / 20000
    refined = scipy.optimize.minimize_scalar(
        lambda t: -slope(t),
        bounds=(best - step, best + step),
        method="bounded",
        options={"xatol": 1e-12},
    )
    largest = max(slopes.max().item(), -refined.fun)
    # torch's derivative of Hardsigmoid holds 1/6 in float32.
    slack = 1e-7 if isinstance(module, nn.Hardsigmoid) else 1e-15
    for norm in ("l2", "token", "self", "linf"):
        bound = lf.certify(module, norm=norm).bound
        assert largest <= bound * (1 + slack)
        assert bound <= largest * (1 + (2e-4 if isinstance(module, lf.LipSwish) else 2e-6))


def test_activations_that_jump_have_no_constant() -> None:
    """Above its threshold Softplus is the identity: a jump of log(1 + exp(-threshold)) / beta."""
    assert lf.certify(nn.Softplus()).bound == 1.0  # by default the jump is 2e-9
    for module in (nn.Softplus(threshold=0.0), nn.Hardshrink(), nn.Threshold(0.1, 20.0)):
        with pytest.raises(lf.NotCertifiable):
            lf.certify(module)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (1, 4)])
def test_linear(shape: tuple[int, int]) -> None:
    out, width = shape
    linear = nn.Linear(width, out).double()
    jacobian = dense_jacobian(linear, torch.zeros(3, width, dtype=torch.float64))
    l2 = torch.linalg.matrix_norm(jacobian, 2).item()
    for norm in ("l2", "token", "self"):
        assert l2 <= lf.certify(linear, norm=norm).bound <= l2 * 1.01
    linf = jacobian.abs().sum(-1).max().item()
    assert linf <= lf.certify(linear, norm="linf").bound <= linf * (1 + 1e-12)


CONVS = [
    {"kernel_size": k, "stride": s, "dilation": d, "padding": p, "groups": g}
    for k, s, d, p, g in itertools.product((1, 2, 3), (1, 2, 3), (1, 2), (0, 1, 2), (1, 2))
]


@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("kernel", ["normal", "ones"])
def test_conv1d(kernel: str, mode: str) -> None:
    """108 settings: sound, and within a factor of 3. Ones make shifted copies add up."""
    for options in CONVS:
        conv = nn.Conv1d(2, 4, bias=False, dtype=torch.float64, padding_mode=mode, **options)
        if kernel == "ones":
            nn.init.ones_(conv.weight)
        jacobian = dense_jacobian(conv, torch.zeros(1, 2, 7, dtype=torch.float64))
        l2, linf = torch.linalg.matrix_norm(jacobian, 2).item(), jacobian.abs().sum(-1).max().item()
        try:
            bound = lf.certify(conv).bound
        except lf.NotCertifiable:  # a refusal is sound too, where padding repeats pixels
            assert mode == "circular"
            continue
        assert l2 <= bound * (1 + 1e-12), options
        assert bound <= 3 * l2, options
        assert linf <= lf.certify(conv, norm="linf").bound * (1 + 1e-12), options


def test_same_circular_padding_is_certified() -> None:
    conv = nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular").double()
    assert l2_gain_of(conv, torch.zeros(1, 2, 8, dtype=torch.float64)) <= lf.certify(conv).bound


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": (1, 3), "padding": (0, 1)},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 2, "stride": 2},
        {"kernel_size": (3, 2), "dilation": (2, 1), "padding": 2},
        {"kernel_size": 3, "padding": 1, "groups": 2},
        {"kernel_size": 3, "padding": "same"},
        {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    ],
    ids=str,
)
def test_conv2d(options: dict[str, Any]) -> None:
    for fill in (None, 1.0):
        conv = nn.Conv2d(2, 2, dtype=torch.float64, **options)
        if fill is not None:
            nn.init.constant_(conv.weight, fill)
        jacobian = dense_jacobian(conv, torch.zeros(1, 2, 6, 5, dtype=torch.float64))
        l2, linf = torch.linalg.matrix_norm(jacobian, 2).item(), jacobian.abs().sum(-1).max().item()
        assert l2 <= lf.certify(conv).bound * (1 + 1e-12)
        assert lf.certify(conv).bound <= 4 * l2
        assert linf <= lf.certify(conv, norm="linf").bound * (1 + 1e-12)


def test_padding_that_repeats_pixels_is_refused() -> None:
    for mode in ("reflect", "replicate"):
        with pytest.raises(lf.NotCertifiable, match=f"padding_mode='{mode}' .* repeats pixels"):
            lf.certify(nn.Conv1d(1, 1, 3, padding=1, padding_mode=mode))
    with pytest.raises(lf.NotCertifiable, match="no bound in the token norm"):
        lf.certify(nn.Conv1d(1, 1, 3), norm="token")


NORM_LAYERS: dict[str, tuple[nn.Module, torch.dtype]] = {
    "LayerNorm": (nn.LayerNorm(4), torch.float64),
    "LayerNorm, eps": (nn.LayerNorm(4, eps=1e-2, elementwise_affine=False), torch.float64),
    "LayerNorm, 2 dims": (nn.LayerNorm((3, 4)), torch.float64),
    "RMSNorm, eps": (nn.RMSNorm(4, eps=1e-3), torch.float64),
    "RMSNorm in float64": (nn.RMSNorm(4), torch.float64),
    "RMSNorm in float32": (nn.RMSNorm(4), torch.float32),
    "RMSNorm in bfloat16": (nn.RMSNorm(4), torch.bfloat16),
    "RMSNorm without weight in float64": (nn.RMSNorm(4, elementwise_affine=False), torch.float64),
}


@pytest.mark.parametrize("name", NORM_LAYERS)
def test_norm_layers(name: str) -> None:
    """The steepest point is the origin; tokens of every size are tried."""
    module, dtype = NORM_LAYERS[name]
    module = module.to(dtype)
    if module.weight is not None:
        with torch.no_grad():
            module.weight.copy_(torch.randn(module.weight.shape))
    norms = ("l2", "linf") if "2 dims" in name else ("l2", "token", "self", "linf")
    direction = torch.randn(3, 4, dtype=dtype)
    tolerance = 1e-9 if dtype == torch.float64 else 5 * torch.finfo(dtype).eps
    for size in (0.0, 1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1.0):
        jacobian = dense_jacobian(module, size * direction).double()
        l2, linf = torch.linalg.matrix_norm(jacobian, 2).item(), jacobian.abs().sum(-1).max().item()
        for norm in norms:  # a token-wise map has one constant in the first three
            found = linf if norm == "linf" else l2
            assert found <= lf.certify(module, norm=norm).bound * (1 + tolerance), (norm, size)


def test_norm_layers_that_have_no_constant() -> None:
    with pytest.raises(lf.NotCertifiable, match="with eps=0.0 its slope is unbounded") as caught:
        lf.certify(nn.LayerNorm(4, eps=0.0))
    assert caught.value.instead == "lipformer.CenterNorm"
    assert lf.certify(nn.RMSNorm(4)).bound >= torch.finfo(torch.float64).eps ** -0.5
    with pytest.raises(lf.NotCertifiable, match="its bound is inf"):
        lf.certify(nn.Softplus(threshold=0.0))
    with pytest.raises(lf.NotCertifiable, match="no bound in the token norm"):
        lf.certify(nn.LayerNorm((3, 4)), norm="token")


def test_softmax() -> None:
    """1/2, reached at two equal entries."""
    softmax = nn.Softmax(dim=-1)
    x = torch.tensor([[0.0, 0.0, -50.0, -50.0]], dtype=torch.float64)
    found = gains(dense_jacobian(softmax, x), 1, 4)
    for norm in ("l2", "token", "self", "linf"):
        assert lf.certify(softmax, norm=norm).bound == 0.5
        assert found[norm] == pytest.approx(0.5)
    with pytest.raises(lf.NotCertifiable, match="no bound in the token norm"):
        lf.certify(nn.Softmax(dim=-2), norm="token")
    assert lf.certify(nn.Softmax(dim=-2)).bound == 0.5


@pytest.mark.parametrize("activation", ["relu", "gelu", nn.Tanh()], ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder_layer(norm_first: bool, activation: Any) -> None:
    layer = nn.TransformerEncoderLayer(
        4, 2, 6, activation=activation, batch_first=True, norm_first=norm_first, layer_norm_eps=0.5
    )
    layer.self_attn = lf.L2MultiheadAttention(4, 2, batch_first=True, value_proj=False)
    layer = layer.double().eval()
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    attack = lf.attack_lipschitz(layer, x, steps=4, restarts=4)
    found = gains(dense_jacobian(layer, attack.input), 3, 4)
    for norm in ("l2", "token", "linf"):
        bound = lf.certify(layer, seq_len=3, norm=norm).bound
        assert 1.0 <= found[norm] <= bound * (1 + 1e-9), norm


def test_containers_compose() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 2)
    model = nn.Sequential(first, nn.Sequential(nn.Dropout(0.5), nn.ReLU()), nn.Flatten(), second).eval()
    certificate = lf.certify(model)
    product = lf.certify(first).bound * lf.certify(second).bound
    assert product <= certificate.bound <= product * (1 + 1e-12)
    assert lf.certify(nn.Sequential()).bound == 1.0
    with pytest.raises(lf.NotCertifiable, match="a reshape may merge tokens"):
        lf.certify(model, norm="token")


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout(p: float) -> None:
    for cls in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout):
        module = cls(p)
        assert lf.certify(module.eval()).bound == 1.0
        if p == 0:
            assert lf.certify(module.train()).bound == 1.0
        else:
            with pytest.raises(lf.NotCertifiable, match="p=0.5 is random in training mode"):
                lf.certify(module.train())


def test_composition_of_many_parts_is_rounded_up() -> None:
    """The exact product of fractions, not its rounding."""
    parts = [lf.BallProjection(1.0), *(nn.Sigmoid() for _ in range(3)), *(nn.SiLU() for _ in range(50))]
    exact = math.prod(Fraction(lf.certify(part).bound) for part in parts)
    assert Fraction(lf.certify(nn.Sequential(*parts)).bound) >= exact


def test_channels_that_become_tokens() -> None:
    attention = lf.L2MultiheadAttention(4, 1, batch_first=True, value_proj=False)
    with pytest.raises(lf.NotCertifiable, match="grows with the number of tokens"):
        lf.certify(nn.Sequential(nn.Conv1d(2, 97, 1), attention), seq_len=2)


def test_tokens_made_inside_an_inner_sequence_are_counted() -> None:
    """Behind the reshape the attention sees 16 tokens, whatever number the question is about."""
    attention = lf.L2MultiheadAttention(2, 1, batch_first=True)
    inner = nn.Sequential(nn.Flatten(1), nn.Unflatten(1, (16, 2)))
    for reshape in (inner, nn.Sequential(inner), lf.Contractive(inner)):
        with pytest.raises(lf.NotCertifiable, match="number of tokens"):
            lf.certify(nn.Sequential(reshape, attention), seq_len=2)
