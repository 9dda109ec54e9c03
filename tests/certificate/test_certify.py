"""certify: refusals with a reason, the tree and its table, rules of the user's own."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import lipformer as lf
from lipformer.certificate import bounds as _registry
from lipformer.functional import l2_gain

D, H, N = 8, 2, 6


@pytest.fixture(autouse=True)
def _rules_of_this_test_alone() -> Iterator[None]:
    rules = dict(_registry.bound_rules._rules)
    yield
    _registry.bound_rules._rules.clear()
    _registry.bound_rules._rules.update(rules)


def refusal(module: nn.Module, **question: object) -> lf.NotCertifiable:
    with pytest.raises(lf.NotCertifiable) as caught:
        lf.certify(module, **question)
    error = caught.value
    for text in (error.reason, error.instead, error.path or "the module"):
        assert text
        assert text in str(error)
    return error


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class LoudLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 100 * super().forward(x)


class QuietLinear(nn.Linear):
    """Another class, the same forward."""


def replaced(linear: nn.Linear) -> nn.Linear:
    linear.forward = lambda x: 100 * x  # type: ignore[method-assign]
    return linear


def hooked(linear: nn.Linear) -> nn.Linear:
    linear.register_forward_hook(lambda module, given, out: 100 * out)
    return linear


def attention(**options: Any) -> lf.L2MultiheadAttention:
    return lf.L2MultiheadAttention(D, H, value_proj=True, **options)


REFUSED: dict[str, tuple[nn.Module, dict[str, Any], str, str, str]] = {
    "dot products": (
        nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.MultiheadAttention(D, H))),
        *({}, "1.0", "dot-product attention has no finite Lipschitz constant", "L2MultiheadAttention"),
    ),
    "unknown": (
        nn.Sequential(nn.ReLU(), Doubling()),
        *({}, "1", "no bound is known", "register_bound(Doubling)"),
    ),
    "dropped": (
        attention(dropout=0.1),
        *({"seq_len": N}, "", "attention dropout of 0.1 is random in training mode", ""),
    ),
    "replaced": (replaced(nn.Linear(D, D)), {}, "", "forward was replaced", ""),
    "hooked": (hooked(nn.Linear(D, D)), {}, "", "forward hook", ""),
    "projection": (lf.BallProjection(1.0), {"norm": "linf"}, "", "no bound in the linf norm", ""),
    "rotary": (
        attention(positions="rotary"),
        *({"seq_len": N, "norm": "linf"}, "", "no isometries in the linf norm", ""),
    ),
    "self": (attention(), {"seq_len": N, "norm": "self"}, "", "needs a causal layer", ""),
    "embedding": (nn.Embedding(3, 4), {}, "", "lookup of integers", ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    module, question, path, reason, instead = REFUSED[name]
    error = refusal(module, **question)
    assert error.path == path
    assert reason in error.reason
    assert instead in error.instead


def test_dropout_in_training() -> None:
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(D, D))
    error = refusal(model.train())
    assert error.path == "0"
    assert "p=0.1" in error.reason
    assert "eval()" in error.instead
    assert lf.certify(model.eval()).bound > 0


def test_a_subclass_with_a_forward_of_its_own() -> None:
    error = refusal(nn.Sequential(LoudLinear(D, D)))
    assert error.path == "0"
    assert "overrides the forward of Linear" in error.reason
    assert "register_bound(LoudLinear)" in error.instead
    linear = QuietLinear(D, D)
    assert lf.certify(linear).bound >= torch.linalg.matrix_norm(linear.weight, 2).item()


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_old_style_weight_hooks() -> None:
    modules = {
        "WeightNorm": nn.utils.weight_norm(nn.Linear(D, D)),
        "SpectralNorm": nn.utils.spectral_norm(nn.Linear(D, D)),
        "RandomUnstructured": prune.random_unstructured(nn.Linear(D, D), "weight", 0.5),
    }
    for hook, module in modules.items():
        error = refusal(nn.Sequential(module))
        assert error.path == "0"
        assert f"the forward pre-hook {hook} may change its weights" in error.reason
        assert "spectral_bound" in error.instead


def test_parametrizations_of_torch() -> None:
    """The weight that the forward pass reads counts, also where each read is a power iteration."""
    for parametrized in (parametrizations.weight_norm, parametrizations.spectral_norm):
        for mode in (True, False):
            linear = parametrized(nn.Linear(D, D)).train(mode)
            bound = lf.certify(linear).bound
            norms = [torch.linalg.matrix_norm(linear.weight.double(), 2).item() for _ in range(5)]
            assert max(norms) <= bound <= norms[0] * 1.05


def test_a_parametrized_bias_is_no_matter() -> None:
    on_bias = parametrize.register_parametrization(nn.Linear(D, D), "bias", nn.Tanh())
    assert lf.certify(on_bias).bound > 0


def test_a_length_is_needed() -> None:
    error = refusal(nn.Sequential(lf.L2MultiheadAttention(D, H)))
    assert "grows with the number of tokens, and none was given" in error.reason
    assert "seq_len=N" in error.instead
    limited = lf.L2MultiheadAttention(D, H, max_len=N, value_proj=True)
    assert lf.certify(limited).bound == lf.certify(limited, seq_len=N).bound
    assert lf.certify(limited).seq_len == N
    assert "exceeds the layer's max_len=6" in refusal(limited, seq_len=7).reason
    for options in ({"window": 3}, {"positions": "alibi"}):
        unlimited = lf.L2MultiheadAttention(D, H, causal=True, value_proj=True, **options)
        certificate = lf.certify(unlimited)
        assert certificate.seq_len is None
        assert certificate.domain == "for every input"
        assert lf.certify(unlimited, seq_len=N).bound <= certificate.bound


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(value: float) -> None:
    modules = [
        lf.SpectralLinear(4, 4),
        lf.Contractive(nn.Linear(4, 4)),
        nn.PReLU(4),
        lf.L2MultiheadAttention(4, 2, value_proj=False, max_len=5),
    ]
    for module in modules:
        for name, _ in module.named_parameters():
            broken = copy.deepcopy(module)
            with torch.no_grad():
                broken.get_parameter(name).view(-1)[0] = value
            with pytest.raises(lf.NotCertifiable, match=f"{name}.*not finite.*finite weights"):
                lf.certify(broken)


def test_temperatures_out_of_range() -> None:
    layer = lf.L2MultiheadAttention(4, 2, value_proj=False, max_len=5)
    for value in (-250.0, 250.0):
        with torch.no_grad():
            layer.log_temperature.fill_(value)
        with pytest.raises(lf.NotCertifiable, match="temperatures leave the range"):
            lf.certify(layer)


def test_bad_questions_are_named() -> None:
    with pytest.raises(ValueError, match="norm must be one of l2, token, self, linf, got 'l1'"):
        lf.certify(nn.ReLU(), norm="l1")
    with pytest.raises(ValueError, match="seq_len must be None or an integer >= 1, got 2.5"):
        lf.certify(nn.ReLU(), seq_len=2.5)


def test_a_module_used_twice_counts_twice() -> None:
    linear = nn.Linear(4, 4, bias=False, dtype=torch.float64)
    twice = nn.Sequential(linear, linear)
    x = torch.randn(3, 4, dtype=torch.float64)
    square = torch.linalg.matrix_norm(linear.weight @ linear.weight, 2).item()
    assert square <= lf.certify(twice).bound <= 1.01 * square
    rectified = nn.Sequential(linear, nn.ReLU(), linear)
    assert lf.certify(rectified).bound >= torch.linalg.matrix_norm(linear.weight, 2).item() ** 2
    torch.testing.assert_close(lf.Residual(twice)(x), x + twice(x))
    baked = lf.bake(nn.Sequential(shared := lf.SpectralLinear(4, 4).double(), shared))
    torch.testing.assert_close(baked(x), shared(shared(x)))
    assert baked[0] is baked[1]


def model() -> nn.Module:
    attention = lf.L2MultiheadAttention(D, H, batch_first=True, value_proj=False)
    block = lf.Residual(lf.Contractive(attention, 0.5, norm="l2", seq_len=N))
    return nn.Sequential(block, lf.FeedForward(D, D), nn.Linear(D, 2))


def test_to_dict_is_json() -> None:
    certificate = lf.certify(model())
    data = json.loads(json.dumps(certificate.to_dict()))
    assert data == certificate.to_dict()
    assert data["bound"] == certificate.bound
    assert data["norm"] == "l2"
    assert data["seq_len"] == N
    assert [part["path"] for part in data["parts"]] == ["0", "1", "2"]
    assert [part["kind"] for part in data["parts"]] == ["Residual", "FeedForward", "Linear"]
    assert data["parts"][0]["parts"][0]["path"] == "0.branch"


def test_print_shows_the_tree() -> None:
    certificate = lf.certify(model())
    lines = str(certificate).splitlines()
    assert f"{certificate.bound:.6g}" in lines[0]
    assert "l2 norm" in lines[0]
    assert f"at most {N} tokens" in lines[0]
    assert lines[1].split() == ["module", "kind", "bound", "theorem"]
    rows = (
        ("0", "Residual", "1.5"),
        ("0.branch", "Contractive", "0.5"),
        ("1.up", "SpectralLinear", "1"),
    )
    for path, kind, bound in rows:
        assert any(line.split()[:3] == [path, kind, bound] for line in lines), path
    assert len(lines) == 3 + sum(1 for _ in certificate._walk(0))


def test_certifying_changes_nothing() -> None:
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    lf.certify(net.train())
    assert net.training
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_register_bound() -> None:
    @lf.register_bound(Doubling)
    def rule(module: Doubling, ask: lf.certificate.Ask) -> float:
        ask.only("l2", "token")
        return 2.0

    assert lf.certify(Doubling()).bound == 2.0
    assert lf.certify(nn.Sequential(Doubling(), Doubling())).bound == pytest.approx(4.0)
    assert "no bound in the linf norm" in refusal(Doubling(), norm="linf").reason
    x = torch.randn(2, 3)
    torch.testing.assert_close(lf.Contractive(Doubling(), 0.5)(x), 0.5 * x)


def test_register_bound_with_parts() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) + self.right(x)

    @lf.register_bound(Pair)
    def rule(module: Pair, ask: lf.certificate.Ask) -> lf.certificate.Bound:
        parts = (ask.child(module.left, "left"), ask.child(module.right, "right"))
        return lf.certificate.Bound(parts[0].value + parts[1].value, "a sum", parts)

    certificate = lf.certify(nn.Sequential(Pair()))
    (pair,) = certificate.parts
    assert [part.path for part in pair.parts] == ["0.left", "0.right"]
    assert pair.bound == pytest.approx(pair.parts[0].bound + pair.parts[1].bound)
    assert pair.theorem == "a sum"


@pytest.mark.parametrize("norm", ["l2", "token", "self"])
@pytest.mark.parametrize("n", [2, 16, 64])
def test_identity_weights_leave_the_gain(n: int, norm: str) -> None:
    """One head, W_Q = W_out = I: the bound is l2_gain, which is at least Theorem E."""
    causal = norm == "self"
    layer = lf.L2MultiheadAttention(4, 1, value_proj=False, causal=causal)
    with torch.no_grad():
        nn.init.eye_(layer.q_proj.weight)
        nn.init.eye_(layer.out_proj.weight)
    bound = lf.certify(layer, seq_len=n, norm=norm).bound
    gain = l2_gain(n, norm=norm, is_causal=causal)
    assert gain <= bound <= gain * (1 + 1e-6)
    assert bound >= l2_gain(n, norm="self")


def test_the_mask_decides_the_theorem() -> None:
    """causal=None may be called either way, so it has the larger bound; any_mask the largest."""
    bounds = {}
    for name, options in {
        "causal": {"causal": True},
        "unmasked": {"causal": False},
        "either": {"causal": None},
        "any": {"any_mask": True},
        "window": {"causal": True, "window": 4},
    }.items():
        torch.manual_seed(0)
        bounds[name] = lf.certify(
            lf.L2MultiheadAttention(D, H, value_proj=True, **options), seq_len=64
        ).bound
    assert bounds["either"] == max(bounds["causal"], bounds["unmasked"])
    assert bounds["unmasked"] < bounds["causal"] < bounds["any"]
    assert bounds["window"] < bounds["causal"]
