"""Certified radii of small classifiers, against attacks that try to change their answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.analysis import (
    certified_accuracy,
    certified_radius,
    is_certified,
)
from lipformer.analysis.robustness import radius as radius_module
from lipformer.layers.scaled import Scaled
from lipformer.models import DotProductSelfAttention
from recipes.analysis.lofast import random_maps
from tests.analysis.jacobians import Attention

F64 = torch.float64


class Tokens(nn.Module):
    """Images (B, 1, 4, 4) to 4 tokens of 4 pixels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), 4, 4)


@lf.register_bound(Tokens)
def _(module: Tokens, ask: object) -> float:
    return 1.0


def classifier(kind: str = "dot") -> nn.Sequential:
    def attention() -> nn.Module:
        if kind == "l2":
            layer = lf.L2MultiheadAttention(6, 2, batch_first=True, value_proj=False)
            return lf.Contractive(layer, seq_len=4)
        return nn.Sequential(lf.BallProjection(3.0), Attention(random_maps("unit-norm", 6, 2)).float())

    return nn.Sequential(
        Tokens(),
        nn.Linear(4, 6),
        lf.ConvexResidual(attention()),
        lf.ConvexResidual(lf.FeedForward(6, 8)),
        lf.Residual(attention()),
        nn.Flatten(),
        nn.Linear(24, 3),
    ).eval()


def labelled(model: nn.Module, count: int) -> tuple[Tensor, Tensor]:
    images = torch.rand(count, 1, 4, 4)
    return images, model(images).argmax(1)


def least_margin(model: nn.Module, images: Tensor, labels: Tensor, eps: Tensor, steps: int) -> Tensor:
    """The least f_y - max f_j that projected gradient descent finds within eps, (B,)."""
    shape = (-1, 1, 1, 1)
    best = torch.full((len(images),), torch.inf, dtype=images.dtype)
    for _ in range(3):
        e = torch.randn_like(images)
        e = e * (eps / e.flatten(1).norm(dim=1)).view(shape)
        for _ in range(steps):
            e.requires_grad_()
            logits = model(images + e)
            own = logits.gather(1, labels[:, None])[:, 0]
            others = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
            best = torch.minimum(best, (own - others).detach())
            (slope,) = torch.autograd.grad((own - others).sum(), e)
            e = e.detach() - slope * (0.5 * eps / slope.flatten(1).norm(dim=1).clamp_min(1e-30)).view(
                shape
            )
            e = e * (eps / e.flatten(1).norm(dim=1).clamp_min(1e-30)).clamp_max(1.0).view(shape)
    return best


@pytest.mark.parametrize("kind", ["dot", "l2"])
def test_no_attack_beats_the_radius(kind: str) -> None:
    model = classifier(kind)
    images, labels = labelled(model, 24)
    radius = certified_radius(model, images, labels)
    assert radius.shape == (24,)
    assert bool((radius > 0).float().mean() > 0.9)
    wide, where = model.double(), images.double()
    assert bool((least_margin(wide, where, labels, radius, steps=30) > 0).all())
    # Negative control: somewhat further out the same attack changes answers.
    assert bool((least_margin(wide, where, labels, 20 * radius + 0.1, steps=30) < 0).any())


def test_the_radius_is_where_the_certificate_ends() -> None:
    model = classifier()
    images, labels = labelled(model, 10)
    radius = certified_radius(model, images, labels, tol=1e-4)
    assert bool(is_certified(model, images, labels, radius).all())
    assert not bool(is_certified(model, images, labels, radius + 2e-4).any())
    torch.testing.assert_close(radius, certified_radius(model, images, labels, tol=1e-4, batch_size=3))


@pytest.mark.parametrize("kind", ["dot", "l2"])
def test_few_evaluations_find_what_bisection_finds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier(kind)
    images, labels = labelled(model, 12)
    labels[3] = (labels[3] + 1) % 3
    counts, build = [], radius_module._test

    def counted(*args: object) -> object:
        test = build(*args)
        counts.append(0)

        def slack(eps: Tensor) -> Tensor:
            counts[-1] += 1
            return test.slack(eps)

        return test._replace(slack=slack)

    monkeypatch.setattr(radius_module, "_test", counted)
    radius = certified_radius(model, images, labels, tol=1e-4)
    assert counts[0] <= 9, "bisection took 18"
    monkeypatch.undo()
    low, high = torch.zeros(12, dtype=F64), torch.full((12,), 10.0, dtype=F64)
    for _ in range(30):
        middle = (low + high) / 2
        stands = is_certified(model, images, labels, middle)
        low, high = torch.where(stands, middle, low), torch.where(stands, high, middle)
    assert bool((radius <= low + 1e-8).all())
    assert bool((radius >= low - 1e-4).all())
    for most in (0.5 * float(low.median()), 1e-5):
        cut = certified_radius(model, images, labels, max_radius=most, tol=1e-6)
        torch.testing.assert_close(cut, low.clamp_max(most), rtol=0.0, atol=1.1e-6)


@pytest.mark.parametrize(
    ("slack", "most", "tol", "end"),
    [
        (lambda eps: torch.where(eps < 1.0, 1.0 - eps, torch.nan), 10.0, 1e-3, 1.0),
        (lambda eps: 1.0 - 3.0 * eps, 10.0, 1e-30, 1.0 / 3.0),
        (lambda eps: 1.0 - eps, 1e-4, 1e-3, 1e-4),
        (lambda eps: 1.0 - eps / 1e308, 1.7e308, 1e300, 1e308),
    ],
    ids=["overflow", "no number within tol", "all within tol", "large numbers"],
)
def test_a_search_ends(slack: Callable[[Tensor], Tensor], most: float, tol: float, end: float) -> None:
    asked: list[float] = []

    def counted(eps: Tensor) -> Tensor:
        asked.append(float(eps))
        assert len(asked) < 100, "no end in sight"
        return slack(eps)

    one = torch.ones(1, dtype=F64)
    found = float(radius_module._search(radius_module._Test(counted, one, 0.0 * one), most, tol))
    assert end - max(min(tol, most / 2), 1e-15) <= found <= end
    assert found in asked


def test_wrong_answers_have_radius_zero() -> None:
    model = classifier()
    images, labels = labelled(model, 10)
    wrong = labels.clone()
    wrong[::2] = (labels[::2] + 1) % 3
    radius = certified_radius(model, images, wrong)
    assert bool((radius[::2] == 0).all())
    assert bool((radius[1::2] > 0).any())
    assert certified_accuracy(model, images, wrong, [0.0, 1e-6, 100.0]) == [0.5, 0.5, 0.0]


def test_a_linear_model_has_its_distance_to_the_border() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    images, labels = labelled(model, 20)
    radius = certified_radius(model, images, labels, tol=1e-5)
    logits, weight = model(images), model[1].weight
    apart = (weight[labels][:, None] - weight).norm(dim=-1)
    distance = (logits.gather(1, labels[:, None]) - logits) / apart
    exact = distance.masked_fill(apart == 0, torch.inf).amin(1).double()
    torch.testing.assert_close(radius, exact, rtol=0.0, atol=3e-5)
    assert certified_radius(model, images, labels, max_radius=1e-6, tol=1e-9).tolist() == [1e-6] * 20


def test_heads_may_be_bounded_scaled_nested_or_not_linear() -> None:
    images, labels = torch.rand(8, 1, 4, 4), torch.zeros(8, dtype=torch.long)
    head = lf.SpectralLinear(16, 3)
    plain = nn.Sequential(nn.Flatten(), head)
    labels = plain(images).argmax(1)
    radius = certified_radius(plain, images, labels, tol=1e-6)
    for other in (
        nn.Sequential(nn.Flatten(), Scaled(head, torch.tensor(7.0))),
        nn.Sequential(nn.Identity(), nn.Sequential(nn.Flatten(), nn.Sequential(head))),
    ):
        found = certified_radius(other, images, labels, tol=1e-6)
        torch.testing.assert_close(found, radius, rtol=0.0, atol=1e-5)
    looser = certified_radius(nn.Sequential(nn.Flatten(), head, nn.Identity()), images, labels, tol=1e-6)
    assert bool((looser <= radius + 1e-6).all())
    assert bool((looser > 0).any())


def test_a_body_counts_if_it_is_the_model() -> None:
    class Whole(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.body = classifier()
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x if self.factor == 1.0 else self.factor * x)

    model = Whole(1.0).eval()
    images, labels = labelled(model, 4)
    torch.testing.assert_close(
        certified_radius(model, images, labels), certified_radius(model.body, images, labels)
    )
    with pytest.raises(ValueError, match="something else than its body"):
        certified_radius(Whole(10.0).eval(), images, labels)
    with pytest.raises(TypeError, match=r"must be an nn\.Sequential"):
        certified_radius(nn.Linear(2, 2), torch.rand(1, 2), torch.tensor([0]))


def test_the_model_is_left_as_it_was() -> None:
    model = classifier()
    images, labels = labelled(model, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    certified_radius(model, images, labels)
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])


def test_what_is_not_followed_is_named() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(12, 2)).eval()
    match = r"'0' \(TransformerEncoder\) .* do not follow this class.* lf\.Residual\(lipformer\.models"
    with pytest.raises(lf.NotCertifiable, match=match):
        certified_radius(model, torch.randn(2, 3, 4), torch.tensor([0, 1]))


@pytest.mark.parametrize("tokens", [1, 2, 5, 9])
def test_a_mean_of_tokens_has_its_distance_when_few_of_them_move(tokens: int) -> None:
    """k of n tokens that all go one way move a mean by k/n."""
    model = nn.Sequential(nn.Linear(4, 4), lf.TokenMean(), nn.Linear(4, 3)).to(F64)
    nn.init.orthogonal_(model[0].weight)
    x = torch.randn(6, 5, 4, dtype=F64)
    logits, weight = model(x), model[2].weight
    labels = logits.argmax(1)
    distance = (logits.gather(1, labels[:, None]) - logits) / (weight[labels][:, None] - weight).norm(
        dim=-1
    )
    exact = distance.nan_to_num(nan=torch.inf).amin(1) * 5 / min(tokens, 5)
    radius = certified_radius(model, x, labels, tokens=tokens, tol=1e-5)
    torch.testing.assert_close(radius, exact.detach(), rtol=0.0, atol=3e-5)


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_single_module_takes_steps_of_several_tokens(tokens: int) -> None:
    """Four tokens that move by eps move their mean by eps, a step of 2 eps in the l2 norm."""
    x = torch.tensor([1.0, 0.0], dtype=F64).expand(1, 4, 2)
    radius = certified_radius(nn.Sequential(lf.TokenMean()), x, torch.tensor([0]), tokens=tokens)
    exact = 4 / tokens / math.sqrt(2.0)
    assert 0.4 * exact < radius < exact


def test_nested_modules_count_like_flat_ones() -> None:
    attention = lf.L2MultiheadAttention(4, 2, batch_first=True, causal=False, max_len=5)
    parts = [
        lf.ConvexResidual(lf.Contractive(attention, norm="l2"), 0.2),
        lf.ConvexResidual(lf.SpectralLinear(4, 4), 0.5),
        lf.TokenMean(),
        nn.Linear(4, 3),
    ]
    flat = nn.Sequential(*parts).to(F64)
    nested = nn.Sequential(nn.Sequential(nn.Sequential(*parts[:2]), parts[2]), parts[3])
    x = torch.randn(6, 5, 4, dtype=F64)
    labels = flat(x).argmax(1)
    options: dict[str, Any] = {"tol": 1e-5, "theorem_l": False}
    whole = certified_radius(flat, x, labels, **options)
    for k in (1, 2):
        radius = certified_radius(flat, x, labels, tokens=k, **options)
        torch.testing.assert_close(certified_radius(nested, x, labels, tokens=k, **options), radius)
        assert bool((radius > 1.2 * whole / math.sqrt(k)).all())


class FirstToken(nn.Linear):
    """Of constant 1, as it is registered, and no map of each token alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1].expand_as(x) / math.sqrt(x.shape[1])


@lf.register_bound(FirstToken)
def _(module: FirstToken, ask: object) -> float:
    return 1.0


def test_a_subclass_with_a_forward_of_its_own_may_mix_tokens() -> None:
    model = nn.Sequential(FirstToken(2, 2), lf.TokenMean(), nn.Linear(2, 2, bias=False)).to(F64)
    nn.init.eye_(model[2].weight)
    x = torch.tensor([1.0, 0.0], dtype=F64).expand(1, 4, 2)
    radius = certified_radius(model, x, torch.tensor([0]), tokens=1)
    assert 0.4 < radius < 1.0 / math.sqrt(2.0)


def test_dot_products_are_right_at_radius_zero() -> None:
    """They have no constant in the token norm, and an infinite one times zero is not a number."""
    model = nn.Sequential(lf.Residual(DotProductSelfAttention(4, 2)), lf.TokenMean(), nn.Linear(4, 3))
    x = torch.randn(6, 5, 4)
    labels = model(x).argmax(1)
    assert certified_accuracy(model, x, labels, [0.0, 1e6], tokens=1) == [1.0, 0.0]


def test_the_tokens_of_a_mean_are_those_that_reach_it() -> None:
    """A convolution makes two tokens of eight: the mean is then one of two."""
    model = nn.Sequential(nn.Conv1d(8, 2, 1), lf.TokenMean(), nn.Linear(4, 3)).to(F64)
    x = torch.randn(6, 8, 4, dtype=F64)
    labels = model(x).argmax(1)
    radius = certified_radius(model, x, labels, tokens=1, tol=1e-5)
    x.requires_grad_()
    logits, nearest = model(x), torch.full((6,), torch.inf, dtype=F64)
    for j in range(3):
        margin = logits.gather(1, labels[:, None])[:, 0] - logits[:, j]
        (slope,) = torch.autograd.grad(margin.sum(), x, retain_graph=True)
        steepest = slope.norm(dim=-1).amax(1)
        reach = torch.where(labels == j, torch.inf, margin.detach() / steepest)
        nearest = torch.minimum(nearest, reach)
    assert bool((radius > 0).all())
    assert bool((radius <= nearest).all())
