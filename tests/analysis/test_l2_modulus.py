"""Theorem L through layers and networks: perturbations, radii and certificates around an input."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.analysis import certified_radius, perturbation_bound
from lipformer.layers.scaled import FirstOutput, Scaled
from lipformer.models import VisionTransformer, VisionTransformerConfig

F64 = torch.float64
SETTINGS = {
    "none": {"causal": False},
    "either": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3},
    "alibi": {"causal": True, "positions": "alibi"},
    "rotary": {"positions": "rotary"},
    "paper": {"value_proj": True},
    "ball": {"causal": False, "key_radius": 1.5},
    "smooth ball": {"causal": True, "key_radius": 1.5, "smooth_radius": True},
}
TIGHT = {1: 0.95, 4: 0.8, 8: 0.8}


def layer_of(setting: str, heads: int, dim: int = 16, seed: int = 0) -> lf.L2MultiheadAttention:
    torch.manual_seed(heads + 100 * seed)
    layer = lf.L2MultiheadAttention(dim, heads, batch_first=True, **SETTINGS[setting]).eval()
    # Orthogonal: the heads' norms are then reached together, and attacks come close.
    nn.init.orthogonal_(layer.q_proj.weight)
    nn.init.orthogonal_(layer.out_proj.weight)
    return layer


def structured(n: int, dim: int) -> Tensor:
    """Inputs (B, N, D): random ones of three sizes, two clusters, a star, equal tokens."""
    noise = torch.randn(3, n, dim)
    sign = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0)[:, None]
    star = torch.cat([torch.zeros(1, dim), 2.0 * nn.functional.normalize(noise[1, 1:])])
    clusters = sign * nn.functional.normalize(noise[2, :1]) * 1.5 + 0.1 * noise[0]
    return torch.stack([noise[0], 0.01 * noise[1], 10.0 * noise[2], clusters, star, torch.ones(n, dim)])


def attack(fn: Callable[[Tensor], Tensor], x: Tensor, eps: float, steps: int = 8) -> Tensor:
    """The longest steps of the output found within eps of each sample, (B,), by gradient ascent."""
    at, shape = fn(x).detach(), (-1, *[1] * (x.ndim - 1))
    best = torch.zeros(len(x), dtype=x.dtype)
    for _ in range(2):
        e = torch.randn_like(x)
        for _ in range(steps):
            e = eps * e / e.flatten(1).norm(dim=1).clamp_min(1e-300).view(shape)
            e = e.detach().requires_grad_()
            moved = (fn(x + e) - at).flatten(1).norm(dim=1)
            best = torch.maximum(best, moved.detach())
            e = torch.autograd.grad(moved.sum(), e)[0]
    return best


def first(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        out = module(x)
        return out[0] if isinstance(out, tuple) else out

    return run


def largest(setting: str, heads: int, draws: int, steps: int, seed: int = 0) -> tuple[float, float, int]:
    """The largest ratio of attacks to Theorem L, its least one to the global bound, number of inputs."""
    layer = layer_of(setting, heads, seed=seed).double()
    x = torch.cat([structured(9, 16) for _ in range(draws)]).double()
    constant = lf.certify(layer, seq_len=9).bound
    closest, least, tried = 0.0, math.inf, 0
    for eps in (1e-3, 0.3) if draws == 1 else (1e-3, 0.03, 0.3, 1.5):
        _, bound = perturbation_bound(layer, x, eps)
        found = attack(first(layer), x, eps, steps)
        assert bool((found <= bound * (1 + 1e-9)).all()), (found / bound).tolist()
        assert bool((bound <= eps * constant * (1 + 1e-9)).all())
        closest = max(closest, float((found / bound).max()))
        least = min(least, float(bound.min()) / (eps * constant))
        tried += 2 * steps * len(x)
    return closest, least, tried


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("heads", [1, 4, 8])
def test_no_attack_passes_a_layer(setting: str, heads: int) -> None:
    closest, least, _ = largest(setting, heads, 1, 6)
    assert closest > TIGHT[heads], closest  # a bound lower by the rest would be passed
    assert least < (0.9 if "ball" in setting else 0.6)  # not the global one


@pytest.mark.slow
@pytest.mark.parametrize("heads", [4, 8])
def test_no_input_of_half_a_million_passes_a_layer(heads: int) -> None:
    tried, seed = 0, 0
    while tried < 500_000:
        seed += 1
        tried += sum(largest(setting, heads, 8, 20, seed)[2] for setting in SETTINGS)


@pytest.mark.parametrize("norm", ["l2", "self"])
def test_attention_in_wrappers(norm: str) -> None:
    layer = layer_of("alibi", 4)
    x = structured(9, 16).double()[[0, 1, 3]]
    contractive = lf.Contractive(nn.Sequential(lf.TokenShift(16), layer, nn.Linear(16, 16)), norm=norm)
    baked = lf.bake(contractive)
    assert isinstance(baked, FirstOutput)
    for module in (
        contractive,
        baked,
        lf.Contractive(nn.Sequential(lf.FeedForward(16, 16), lf.Residual(layer)), norm="l2"),
        Scaled(FirstOutput(layer), torch.tensor(-0.3)),
        lf.Residual(contractive),
        lf.ConvexResidual(contractive, 0.3),
        lf.InvertibleResidual(layer, mode="causal"),
        nn.Sequential(lf.TokenShift(16), lf.Residual(nn.Sequential(nn.LayerNorm(16), layer))),
        lf.flows.InvertibleSequential(lf.InvertibleResidual(layer, norm="l2"), lf.flows.Permutation(16)),
    ):
        module = copy.deepcopy(module).double().eval()
        y, bound = perturbation_bound(module, x, 0.05)
        assert torch.allclose(y, module(x), rtol=1e-9, atol=1e-9)
        found = attack(module, x, 0.05, steps=5)
        assert bool((found <= bound * (1 + 1e-9)).all()), (
            type(module).__name__,
            (found / bound).tolist(),
        )
        assert float((found / bound).max()) > 0.2
        constant = lf.certify(module, seq_len=9).bound
        assert float(bound.min()) < 0.95 * 0.05 * constant, type(module).__name__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_function_of_narrow_weights_is_bounded(dtype: torch.dtype) -> None:
    for setting in ("none", "rotary", "alibi"):
        model = lf.Contractive(layer_of(setting, 4).to(dtype), norm="l2", seq_len=9)
        x = structured(9, 16).to(dtype)
        y, bound = perturbation_bound(model, x, 0.1)
        assert y.dtype == dtype
        # The same weights in float64: what a baked layer multiplies by.
        wide = lf.bake(model).double()
        found = attack(wide, x.double(), 0.1)
        assert bool((found <= bound * (1 + 1e-4)).all()), (found / bound).tolist()
        assert float((found / bound).max()) > 0.4
        assert float(bound.max()) < 0.09


def test_what_the_global_bound_refuses_is_refused() -> None:
    x = torch.randn(2, 5, 8)
    second = lf.L2MultiheadAttention(8, 2, causal=False)
    dropping = lf.L2MultiheadAttention(8, 2, dropout=0.1, batch_first=True, causal=False)
    whole = nn.LayerNorm([2, 5, 8])
    for module in (second, lf.Contractive(second, seq_len=5), dropping, lf.Residual(dropping), whole):
        with pytest.raises(lf.NotCertifiable, match=r"samples|dropout"):
            perturbation_bound(module, x, 0.1)


def test_layer_norm_is_bounded_by_its_least_deviation() -> None:
    norm = nn.LayerNorm(16).double()
    nn.init.normal_(norm.weight)
    x = structured(9, 16).double()
    for eps in (1e-3, 0.3, 30.0):
        _, bound = perturbation_bound(norm, x, eps)
        found = attack(norm, x, eps)
        assert bool((found <= bound * (1 + 1e-9)).all())
        assert bool((bound <= eps * lf.certify(norm).bound * (1 + 1e-9)).all())
    _, bound = perturbation_bound(norm, x[:1], 1e-3)
    assert float(attack(norm, x[:1], 1e-3) / bound) > 0.5
    assert float(bound) < 1e-2 * 1e-3 * lf.certify(norm).bound


def vision(**options: object) -> VisionTransformer:
    torch.manual_seed(0)
    config = VisionTransformerConfig(
        "l2", 8, 1, 2, num_classes=3, dim=16, num_heads=2, num_layers=2, attention_weight=0.5, **options
    )
    return VisionTransformer(config).eval()


def test_a_vision_transformer_is_certified_around_each_image() -> None:
    model, images = vision(), torch.rand(6, 1, 8, 8)
    constant = lf.certify(model).bound
    wide, x = copy.deepcopy(model).double(), images.double()
    for eps in (0.01, 0.1, 1.0):
        _, bound = perturbation_bound(model, images, eps)
        found = attack(wide, x, eps)
        assert bool((found <= bound * (1 + 1e-5)).all())
        assert bool((bound <= eps * constant * (1 + 1e-12)).all())
    _, bound = perturbation_bound(model, images, 0.1)
    assert float(bound.max()) < 0.65 * 0.1 * constant
    labels = model(images).argmax(1)
    radius = certified_radius(model, images, labels, max_radius=0.1, tol=1e-3)
    # Globally the features move by at most eps.
    features = nn.Sequential(nn.Flatten(), copy.deepcopy(model.head)).eval()
    at = model.features(images)
    everywhere = certified_radius(features, at, labels, max_radius=0.1, tol=1e-3)
    assert float(radius.sum()) > 1.3 * float(everywhere.sum()) > 0.0


def test_certify_around_an_input() -> None:
    model, images = vision(), torch.rand(3, 1, 8, 8)
    around, everywhere = lf.certify(model, at=images, radius=0.1), lf.certify(model)
    assert around.domain == "for inputs within 0.1 of the given x"
    assert around.norm == "l2"
    _, moved = perturbation_bound(model, images, 0.1)
    assert around.bound == pytest.approx(float(moved.max()) / 0.1, rel=1e-12)
    assert around.bound < 0.65 * everywhere.bound

    def rows(certificate: object) -> dict[str, tuple[float, str]]:
        found = {certificate.path: (certificate.bound, certificate.theorem)}
        for part in certificate.parts:
            found |= rows(part)
        return found

    here, whole = rows(around), rows(everywhere)
    assert here.keys() == whole.keys()
    for path, (bound, theorem) in here.items():
        assert bound <= whole[path][0]
        leaf = path in ("body.attention_0.branch", "body.attention_1.branch")
        assert theorem == ("Theorem L" if leaf else whole[path][1])
    assert "Theorem L" in str(around)
    # Far away from the input nothing is gained, and the table says so.
    far = lf.certify(model, at=images, radius=1e9)
    assert far.bound == pytest.approx(everywhere.bound, rel=1e-4)


def test_a_certificate_around_an_input_holds_for_shorter_steps() -> None:
    model, x = layer_of("none", 2).double(), structured(9, 16).double()
    bound = lf.certify(model, at=x, radius=0.5).bound
    for eps in (1e-3, 0.05, 0.2, 0.5):
        assert float(attack(first(model), x, eps).max()) <= eps * bound


def test_dot_products_are_named_too() -> None:
    config = VisionTransformerConfig("dot_product", 8, 1, 2, num_classes=3, dim=8, num_layers=1)
    model = VisionTransformer(config).eval()
    found = lf.certify(model, at=torch.rand(2, 1, 8, 8), radius=0.1)
    assert "LoFAST" in str(found)
    with pytest.raises(lf.NotCertifiable):
        lf.certify(model)


@pytest.mark.parametrize("variant", ["lipschitz", "contractive", "invertible", "l2"])
def test_language_models_around_embedded_tokens(variant: str) -> None:
    options = {"dim": 16, "num_heads": 2, "num_layers": 2, "max_len": 12}
    model = lf.models.VARIANTS[variant](11, **options).eval()
    x = model.embed(torch.randint(0, 11, (2, 10))).detach()
    found = lf.certify(model, at=x, radius=1e-3)
    assert found.bound < 0.9 * lf.certify(model, seq_len=10).bound
    wide = copy.deepcopy(model.body).double()
    assert float(attack(wide, x.double(), 1e-3).max()) <= 1e-3 * found.bound * (1 + 1e-5)
    assert found.seq_len == 10


def test_wrong_questions_around_an_input() -> None:
    layer, x = layer_of("none", 2), torch.randn(2, 5, 16)
    radii = [{"at": x, "radius": radius} for radius in (0.0, "1", torch.ones(2))]
    for wrong in ({"at": x}, {"radius": 0.1}, {"at": [1.0], "radius": 1.0}, *radii):
        with pytest.raises(ValueError, match="needs both at"):
            lf.certify(layer, **wrong)
    with pytest.raises(ValueError, match="tokens"):
        lf.certify(layer, at=x, radius=0.1, seq_len=7)
    with pytest.raises(ValueError, match="at least one sample"):
        lf.certify(layer, at=x[:0], radius=0.1)
    for norm in ("token", "self", "linf"):
        with pytest.raises(lf.NotCertifiable, match="l2 norm alone"):
            lf.certify(layer, at=x, radius=0.1, norm=norm)
    nn.init.constant_(layer.q_proj.weight, float("nan"))
    with pytest.raises(lf.NotCertifiable, match="not finite"):
        lf.certify(layer, at=x, radius=0.1)
