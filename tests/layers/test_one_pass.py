"""OnePass: all norms computed together give what each layer gives alone, and nothing stays."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lipformer as lf
from lipformer.functional import spectral_norm_bound
from lipformer.functional.spectral import bound as _spectral
from lipformer.layers.constants import Constants
from lipformer.layers.freezing import Freezable
from lipformer.layers.one_pass import OnePass

VARIANTS = ("contractive", "lipschitz", "invertible")


def model_of(variant: str, **options: object) -> lf.models.LanguageModel:
    model = lf.models.VARIANTS[variant](11, dim=16, num_heads=2, num_layers=2, max_len=8, **options)
    model = model.double()
    model.initialize(torch.randint(11, (4, 8)))
    return model


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


def alone(model: nn.Module) -> nn.Module:
    """A copy whose OnePass modules know no layers, so that each computes for itself."""
    twin = copy.deepcopy(model)
    for part in twin.modules():
        if isinstance(part, OnePass):
            part._bounded, part._contractive = [], []
    return twin


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of which spectral norms were asked."""
    asked: list[torch.Size] = []

    def counted(weight: Tensor, *, method: str = "cholesky") -> Tensor:
        asked.append(weight.shape)
        return spectral_norm_bound(weight, method=method)

    monkeypatch.setattr(_spectral, "spectral_norm_bound", counted)
    return asked


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_and_gradients_are_those_of_layers_alone(variant: str) -> None:
    model = model_of(variant)
    twin = alone(model)
    tokens = torch.randint(11, (2, 8))
    together, apart = model(tokens), twin(tokens)
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-13)
    weight = torch.randn_like(together)
    for a, b in zip(
        gradients(model, (together * weight).sum()),
        gradients(twin, (apart * weight).sum()),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("variant", "calls"), [("contractive", 1), ("lipschitz", 3), ("invertible", 1)])
def test_one_call_for_each_shape(variant: str, calls: int, stacks: list[torch.Size]) -> None:
    model = model_of(variant)
    stacks.clear()
    model(torch.randint(11, (2, 8)))
    assert len(stacks) == calls
    assert len({(max(s[1:]), min(s[1:])) for s in stacks}) == calls


def test_published_linf_scaling_needs_no_spectral_norm(stacks: list[torch.Size]) -> None:
    model = model_of("contractive", bound="kim2021")
    stacks.clear()
    model(torch.randint(11, (2, 8)))
    assert stacks == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_changed_weight_is_seen_in_the_next_pass(variant: str) -> None:
    model = model_of(variant)
    tokens = torch.randint(11, (2, 8))
    model(tokens)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    model(tokens).square().mean().backward()
    optimiser.step()
    torch.testing.assert_close(model(tokens), alone(model)(tokens), rtol=1e-12, atol=1e-13)


def kept(model: nn.Module) -> list[Tensor | None]:
    return [part._kept for part in model.modules() if isinstance(part, Freezable)]


def test_nothing_stays_after_a_pass_nor_after_an_error() -> None:
    model = model_of("lipschitz")
    model(torch.randint(11, (2, 8)))
    assert not any(k is not None for k in kept(model))
    with pytest.raises(RuntimeError, match="indices"):
        model(torch.randn(2, 8))
    assert not any(k is not None for k in kept(model))
    assert not any(p._freezing for p in model.modules() if isinstance(p, Freezable))


def test_a_freeze_around_the_pass_stays_frozen(stacks: list[torch.Size]) -> None:
    model = model_of("contractive")
    tokens = torch.randint(11, (2, 8))
    with lf.frozen(model):
        first = model(tokens)
        stacks.clear()
        assert torch.equal(model(tokens), first)
        assert stacks == []
    model(tokens)
    assert stacks != []


def test_a_baked_model_computes_no_norm(stacks: list[torch.Size]) -> None:
    for variant in VARIANTS:
        baked = lf.bake(model_of(variant))
        stacks.clear()
        baked(torch.randint(11, (2, 8)))
        assert stacks == []


def test_copies_use_their_own_layers() -> None:
    model = model_of("contractive")
    twin = copy.deepcopy(model)
    tokens = torch.randint(11, (2, 8))
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.5)
    torch.testing.assert_close(twin(tokens), alone(twin)(tokens), rtol=1e-12, atol=1e-13)
    assert not torch.equal(twin(tokens), model(tokens))


def test_a_replaced_layer_computes_for_itself() -> None:
    block = lf.ConvexResidual(lf.FeedForward(8, 16)).double()
    block.branch = lf.FeedForward(8, 32).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(block(x), 0.5 * x + 0.5 * block.branch(x))


def test_contractive_follows_a_layer_that_is_put_in_later() -> None:
    layer = lf.Contractive(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), 0.5, norm="l2")
    layer.module[2] = nn.Linear(8, 8)
    nn.init.orthogonal_(layer.module[2].weight, gain=100.0)
    layer.module[0] = nn.Identity()
    attack = lf.attack_lipschitz(layer, torch.randn(1, 4, 8), steps=5, restarts=1).value
    assert 0.1 < attack <= 0.5


def test_one_parametrization_of_two_weights_keeps_them_apart() -> None:
    bound = lf.layers.SpectralBound(1.0, "normalize")
    layers = [nn.Linear(8, 8, bias=False).double() for _ in range(2)]
    for layer in layers:
        nn.utils.parametrize.register_parametrization(layer, "weight", bound)
    block = lf.ConvexResidual(nn.Sequential(*layers))
    x = torch.randn(3, 8, dtype=torch.float64)
    want = alone(block)(x)
    torch.testing.assert_close(block(x), want, rtol=1e-12, atol=1e-13)
    with lf.frozen(block):
        torch.testing.assert_close(block(x), want, rtol=1e-12, atol=1e-13)


class Twice(nn.Module):
    """Two weights that a rule of its own bounds under one name."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        for part, gain in zip(self.parts, (0.1, 100.0), strict=True):
            nn.init.orthogonal_(part.weight, gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[1](self.parts[0](x))


@lf.register_bound(Twice)
def _(module: Twice, ask: lf.certificate.Ask) -> float | Tensor:
    first, second = (ask.child(part, "some part").value for part in module.parts)
    return first * second


class Fast(nn.Module):
    """Runs a layer with other weights than it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = lf.Contractive(nn.Linear(8, 8, bias=False), 0.5, norm="l2")

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: 100 * p for name, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, weights, (x,))


@lf.register_bound(Fast)
def _(module: Fast, ask: lf.certificate.Ask) -> lf.certificate.Bound:
    return ask.child(module.inner, "inner")


@pytest.mark.parametrize(
    "layer", [lf.Contractive(Twice(), 0.5, norm="l2"), lf.Residual(Fast())], ids=["names", "weights"]
)
def test_a_norm_belongs_to_its_weight(layer: nn.Module) -> None:
    jacobian = torch.autograd.functional.jacobian(layer, torch.randn(8))
    assert torch.linalg.matrix_norm(jacobian, 2) <= lf.certify(layer).bound * (1 + 1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_functional_call_after_a_pass_and_other_weights(variant: str) -> None:
    model = model_of(variant)
    tokens = torch.randint(11, (2, 8))
    names = set(model.state_dict())
    model(tokens)
    assert set(model.state_dict()) == names
    weights = {name: 1.5 * p.detach() for name, p in model.named_parameters()}
    got = torch.func.functional_call(model, weights, (tokens,))
    model.load_state_dict(weights, strict=False)
    torch.testing.assert_close(got, model(tokens), rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_may_go_and_may_be_empty() -> None:
    layer = lf.Contractive(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), 0.5, norm="l2")
    del layer.module[2]
    assert layer(torch.randn(3, 8)).shape == (3, 8)
    layer.module = nn.Linear(8, 4)
    assert layer(torch.randn(3, 8)).shape == (3, 4)
    empty = lf.Residual(nn.Sequential(lf.SpectralLinear(8, 0), lf.SpectralLinear(0, 8)))
    x = torch.randn(3, 8)
    assert torch.equal(empty(x), x)


class TestConstants:
    def test_by_value(self) -> None:
        constants, cpu = Constants(), torch.device("cpu")
        first = constants((1.0, 2.0), cpu)
        assert constants((1.0, 2.0), cpu) is first
        assert constants((1.0, 3.0), cpu).tolist() == [1.0, 3.0]
        assert constants(((1.0, 2.0), (3.0, 4.0)), cpu, torch.float32).shape == (2, 2)
        assert copy.deepcopy(constants)._held == {}

    def test_they_do_not_pile_up(self) -> None:
        constants = Constants()
        for i in range(100):
            constants((float(i),), torch.device("cpu"))
        assert len(constants._held) <= 16

    def test_a_layer_first_used_in_inference_mode_can_be_trained(self) -> None:
        layer = lf.Contractive(
            lf.L2MultiheadAttention(8, 2, causal=True, positions="alibi", value_proj=True), norm="l2"
        )
        layer.module.constants = Constants()
        x = torch.randn(5, 1, 8)
        with torch.inference_mode():
            layer(x)
        layer(x).sum().backward()
        assert layer.module.q_proj.weight.grad is not None

    def test_stand_ins_are_not_kept(self) -> None:
        constants, cpu = Constants(), torch.device("cpu")
        with FakeTensorMode():
            constants((1.0, 2.0), cpu)
        assert constants((1.0, 2.0), cpu).tolist() == [1.0, 2.0]

    def test_slopes_are_not_rounded_with_the_weights(self) -> None:
        slopes = (0.3, 0.7)
        layer = lf.L2MultiheadAttention(
            8, 2, causal=True, positions="alibi", slopes=slopes, value_proj=True
        ).bfloat16()
        found = layer._slopes(torch.zeros(1))
        assert found is not None
        assert found.tolist() == list(layer.slopes or ())
