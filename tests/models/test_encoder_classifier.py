"""Classifiers of sequences: the battery of a certified layer, padding, radii under attack, files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lipformer as lf
from lipformer.analysis import certified_accuracy, certified_radius, is_certified
from lipformer.models import EncoderClassifier, EncoderClassifierConfig, VisionTransformer
from tests.layers.battery import CertifiedLayer, error, slow_compile

SMALL: dict[str, Any] = {"dim": 8, "num_heads": 2, "num_layers": 1, "hidden": 8, "max_len": 6}


def config(variant: str = "l2", **options: Any) -> EncoderClassifierConfig:
    given: dict[str, Any] = {"vocab_size": None if "features" in options else 20}
    return EncoderClassifierConfig(variant, 3, **{**SMALL, **given, **options})


def batch(count: int = 8, symbols: int = 20, most: int = 6) -> tuple[Tensor, Tensor]:
    """Symbols (B, N) and their padding, texts of every length."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(symbols, (count, most), generator=generator)
    lengths = 1 + torch.arange(count) % most
    return tokens, torch.arange(most) >= lengths[:, None]


class _Encoder(CertifiedLayer):
    """From embedded tokens, with a mask that hides the last two or none."""

    norms = ("l2",)
    variants = ("plain", "padded")
    least = 0.02

    def call(self, module: nn.Module, x: Tensor, variant: str = "plain") -> Tensor:
        hidden = (torch.arange(x.shape[1], device=x.device) >= 3).expand(x.shape[:2])
        return module(x, hidden if variant == "padded" else None)


class TestContinuous(_Encoder):
    def make(self) -> nn.Module:
        return EncoderClassifier(config(features=8, attention_weight=0.3))

    test_compile = slow_compile


class TestKeysInABall(_Encoder):
    tokens = (5, 4)
    test_compile = None  # type: ignore[assignment]

    def make(self) -> nn.Module:
        own = {"key_radius": 1.0, "token_shift": False, "least": 4, "head_coeff": 3.0}
        return EncoderClassifier(config(features=4, **own))


@pytest.mark.parametrize("options", [{}, {"least": 4}, {"head_coeff": 0.5, "key_radius": 1.0}])
def test_the_certificate_is_what_the_config_says(options: dict[str, Any]) -> None:
    """Whatever the weights are."""
    model = EncoderClassifier(config(num_layers=2, **options))
    expected = options.get("head_coeff", 1.0) / options.get("least", 1) ** 0.5
    for _ in range(2):
        assert lf.certify(model).bound == pytest.approx(expected, rel=1e-9)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
    table = model.embed(torch.arange(20)[None])
    assert table.norm(dim=-1).max() <= 1.0 + 1e-6


def test_dot_products_have_no_certificate() -> None:
    with pytest.raises(lf.NotCertifiable) as refusal:
        lf.certify(EncoderClassifier(config("dot_product")))
    assert "attention_0" in refusal.value.path


@pytest.mark.parametrize("variant", ["l2", "dot_product"])
def test_padding_counts_for_nothing(variant: str) -> None:
    model = EncoderClassifier(config(variant, least=2, num_layers=2)).double().eval()
    tokens, padding = batch()
    logits = model(tokens, padding)
    others = torch.where(padding, (tokens + 7) % 20, tokens)
    assert torch.equal(model(others, padding), logits)
    for row, hidden, expected in zip(tokens, padding, logits, strict=True):
        assert error(model(row[None, ~hidden])[0], expected) <= 1e-12
    assert not torch.allclose(model(tokens), logits), "the mask is not ignored"
    x = model.embed(tokens)
    assert torch.equal(model(x, padding), logits)
    assert torch.equal(model.head(model.features(x, padding)), logits)


def least_margin(
    model: nn.Module, x: Tensor, hidden: Tensor, labels: Tensor, eps: Tensor, tokens: int | None
) -> Tensor:
    """The least margin that projected gradient descent finds within eps of some tokens, (B,)."""
    best = torch.full((len(x),), torch.inf, dtype=x.dtype)
    for start in range(3):
        # The tokens that move: the first ones, others, or all.
        order = torch.rand(x.shape[:2]).masked_fill(hidden, -1.0).argsort(1, descending=True)
        moves = torch.zeros_like(hidden)
        moves.scatter_(1, order[:, : tokens or x.shape[1]], True)
        moves = (moves & ~hidden)[..., None]

        def inside(e: Tensor, moves: Tensor = moves) -> Tensor:
            e = e * moves
            size = (
                e.flatten(1).norm(dim=1)[:, None, None]
                if tokens is None
                else e.norm(dim=2, keepdim=True)
            )
            return e * (eps[:, None, None] / size.clamp_min(1e-30)).clamp_max(1.0)

        e = inside(100.0 * torch.randn_like(x) if start else torch.zeros_like(x))
        for _ in range(25):
            e.requires_grad_()
            logits = model(x + e, hidden)
            own = logits.gather(1, labels[:, None])[:, 0]
            margin = own - logits.scatter(1, labels[:, None], -torch.inf).amax(1)
            best = torch.minimum(best, margin.detach())
            (slope,) = torch.autograd.grad(margin.sum(), e)
            size = slope.flatten(1).norm(dim=1)[:, None, None].clamp_min(1e-30)
            e = inside((e - 0.5 * eps[:, None, None] * slope / size).detach())
    return best


@pytest.fixture(scope="module")
def trained() -> tuple[EncoderClassifier, Tensor, Tensor, Tensor]:
    """A model that has learnt which of three groups most symbols are of, and texts."""
    torch.manual_seed(0)
    options = {"token_shift": False, "attention_weight": 0.3, "max_len": 12, "num_layers": 2}
    model = EncoderClassifier(config(vocab_size=21, **options))
    tokens, lengths = torch.randint(21, (200, 12)), torch.tensor([3, 7, 12])[torch.arange(200) % 3]
    padding = torch.arange(12) >= lengths[:, None]
    votes = F.one_hot(tokens % 3, 3).masked_fill(padding[..., None], 0).sum(1)
    labels = votes.argmax(1)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(60):
        optimiser.zero_grad()
        F.cross_entropy(20.0 * model(tokens, padding), labels).backward()
        optimiser.step()
    return model.double().eval(), tokens[:24], padding[:24], labels[:24]


@pytest.mark.parametrize("tokens", [None, 1, 100])
def test_no_attack_beats_the_radius(
    trained: tuple[EncoderClassifier, Tensor, Tensor, Tensor], tokens: int | None
) -> None:
    model, texts, padding, labels = trained
    x = model.embed(texts).detach()
    options: dict[str, Any] = {"tokens": tokens, "key_padding_mask": padding}
    radius = certified_radius(model, x, labels, theorem_l=False, **options)
    assert torch.equal(radius > 0, model(texts, padding).argmax(1) == labels)
    assert (radius > 0).double().mean() > 0.7
    right = radius > 0
    given = (x[right], padding[right], labels[right])
    assert bool((least_margin(model, *given, radius[right], tokens) > 0).all())
    # Negative control: farther out the same attack changes answers.
    assert bool((least_margin(model, *given, 8.0 * radius[right], tokens) < 0).any())
    if tokens == 1:
        some = (x[1::3][:6], labels[1::3][:6])  # of one length
        options["key_padding_mask"] = padding[1::3][:6]
        around = certified_radius(model, *some, tol=0.02, **options)
        assert bool((around >= radius[1::3][:6] - 0.02).all()), "Theorem L only adds"
        found = around > 0
        given = (some[0][found], options["key_padding_mask"][found], some[1][found])
        assert bool((least_margin(model, *given, around[found], tokens) > 0).all())


def test_radii_follow_from_margins_and_lengths(
    trained: tuple[EncoderClassifier, Tensor, Tensor, Tensor],
) -> None:
    """The l2 norm gives 1/sqrt(n), one token alone less; the more tokens, the smaller the radius."""
    model, texts, padding, labels = trained
    x, n = model.embed(texts), (~padding).sum(1).double()
    weight = model.head.weight.detach()
    logits = model(texts, padding).detach()
    apart = (weight[labels][:, None] - weight).norm(dim=-1)
    margin = (logits.gather(1, labels[:, None]) - logits) / apart
    margin = margin.scatter(1, labels[:, None], torch.inf).amin(1).clamp_min(0.0)
    options: dict[str, Any] = {"key_padding_mask": padding, "theorem_l": False, "tol": 1e-5}
    whole = certified_radius(model, x, labels, **options)
    torch.testing.assert_close(whole, margin * n.sqrt(), rtol=0.0, atol=2e-5)
    kept = (1.0 - 0.3) ** 2
    one = certified_radius(model, x, labels, tokens=1, **options)
    expected = margin * n / (kept + (1.0 - kept) * n.sqrt())
    torch.testing.assert_close(one, expected, rtol=0.0, atol=2e-5)
    two = certified_radius(model, x, labels, tokens=2, **options)
    every = certified_radius(model, x, labels, tokens=12, **options)
    assert bool((one + 1e-5 >= two).all())
    assert bool((two + 1e-5 >= every).all())
    assert bool((every + 1e-5 >= whole / n.sqrt()).all())
    x, labels, one = x[::6], labels[::6], one[::6]  # of three tokens: these two are by Theorem L
    few: dict[str, Any] = {"key_padding_mask": padding[::6], "tokens": 1}
    assert torch.equal(is_certified(model, x, labels, 0.99 * one, **few), one > 0)
    share = certified_accuracy(model, x, labels, [0.0, 50.0], **few)
    assert share == [(one > 0).double().mean().item(), 0.0]


@pytest.mark.parametrize("variant", ["l2", "dot_product"])
def test_at_radius_zero_right_answers_stand(variant: str) -> None:
    """Also where no norm of tokens has a bound; and a mask may be that of one sample."""
    model = EncoderClassifier(config(variant, features=4)).double().eval()
    x, padding = torch.randn(1, 6, 4, dtype=torch.float64), torch.arange(6) >= 4
    labels = model(x, padding[None]).argmax(1)
    options: dict[str, Any] = {"tokens": 1, "key_padding_mask": padding}
    assert certified_accuracy(model, x, labels, [0.0], **options) == [1.0]
    assert is_certified(model, x, (labels + 1) % 3, 0.0, **options).tolist() == [False]


def test_a_mask_that_is_not_used_is_found_out() -> None:
    """And one whose padding is not behind the tokens, or hides all of them."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(24, 2)).eval()
    x, labels = torch.randn(2, 6, 4), torch.zeros(2, dtype=torch.int64)
    padding = torch.arange(6) >= torch.tensor([[6], [6]])
    assert certified_radius(plain, x, labels, key_padding_mask=padding).shape == (2,)

    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(lf.TokenMean(), nn.Linear(4, 2))

        def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
            return self.body(x)

    shorter = torch.arange(6) >= torch.tensor([[4], [6]])
    with pytest.raises(ValueError, match="Careless gives something else with key_padding_mask"):
        certified_radius(Careless().eval(), x, labels, key_padding_mask=shorter)
    model = EncoderClassifier(config(features=4)).eval()
    for wrong in (~shorter, torch.ones_like(shorter)):
        with pytest.raises(ValueError, match="must leave at least one token of each sample"):
            certified_radius(model, x, labels, key_padding_mask=wrong)
    with pytest.raises(ValueError, match="tokens must be an integer >= 1, .* got 0 and"):
        certified_radius(model, x, labels, tokens=0)
    with pytest.raises(ValueError, match="tokens must be an integer >= 1, .* got 1.5 and"):
        certified_radius(model, x, labels, tokens=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens must be an integer >= 1, .* got 1 and"):
        certified_radius(model, x[:, 0], labels, tokens=1)
    with pytest.raises(ValueError, match=r"labels from 0 to 2, got \[0, 3\]"):
        certified_radius(model, x, torch.tensor([0, 3]))


@pytest.mark.parametrize("variant", ["l2", "dot_product"])
def test_dtypes_copies_gradients_and_saved_models(variant: str, tmp_path: Path) -> None:
    model = EncoderClassifier(config(variant, dropout=0.1))
    tokens, padding = batch()
    model(tokens, padding).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    model.eval()
    expected = copy.deepcopy(model).double()(tokens, padding)
    assert error(model(tokens, padding), expected) <= 1e-5
    assert error(copy.deepcopy(model).bfloat16()(tokens, padding), expected) <= 0.1
    assert error(lf.bake(model)(tokens, padding), expected) <= 1e-5
    model.save_pretrained(tmp_path)
    again = EncoderClassifier.from_pretrained(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(tokens, padding), model(tokens, padding))
    with pytest.raises(ValueError, match='"format" is not "lipformer.VisionTransformer"'):
        VisionTransformer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"vocab_size": None},
            "give vocab_size, .* or features, .*; got vocab_size=None, features=None",
        ),
        ({"features": 3, "vocab_size": 5}, "got vocab_size=5, features=3"),
        ({"features": 3, "token_radius": 2.0}, "has no option token_radius, got token_radius=2.0"),
        ({"variant": "dot_product", "key_radius": 1.0}, "'dot_product' has no option key_radius"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"least": 0}, "least must be positive and finite, got 0"),
        ({"attention_weight": 1.5}, r"weight must be in \[0, 1\], got 1.5"),
        ({"variant": "lipschitz"}, "variant must be one of dot_product, l2, got 'lipschitz'"),
    ],
)
def test_a_config_is_told_what_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EncoderClassifier(config(**options))


def test_what_is_no_text_is_told_of() -> None:
    model = EncoderClassifier(config())
    with pytest.raises(ValueError, match=r"takes integers \(B, N\), got torch.int64 \(4,\)"):
        model(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"tokens must be \(B, N <= 6, 8\), got \(1, 7, 8\)"):
        model(torch.zeros(1, 7, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"takes vectors \(B, N, features\), got torch.int64"):
        EncoderClassifier(config(features=4))(torch.zeros(1, 3, dtype=torch.int64))
