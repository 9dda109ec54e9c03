"""Perturbations carried through modules, against attacks on the whole of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.analysis import (
    AttentionMaps,
    lofast_bound,
    perturbation_bound,
    register_perturbation,
)
from lipformer.analysis.robustness import perturbation
from recipes.analysis.lofast import attack, random_maps
from tests.analysis.jacobians import Attention

F64 = torch.float64


def attention(dim: int = 6, heads: int = 2) -> Attention:
    return Attention(random_maps("generic", dim, heads))


def blocks(kind: str) -> nn.Sequential:
    """Two blocks of attention and feed-forward, in float64."""

    def residual(branch: nn.Module) -> nn.Module:
        return lf.Residual(branch) if kind == "plain" else lf.ConvexResidual(branch, 0.4)

    parts: list[nn.Module] = []
    for _ in range(2):
        inner = attention() if kind == "bare" else nn.Sequential(lf.BallProjection(2.0), attention())
        parts += [residual(inner), lf.CenterNorm(6), residual(lf.FeedForward(6, 8))]
    return nn.Sequential(*parts).double()


@pytest.mark.parametrize("kind", ["plain", "convex", "bare"])
def test_no_attack_passes_the_bound(kind: str) -> None:
    for scale in (0.3, 1.0, 3.0):  # within the ball, at its border, outside
        model = blocks(kind)
        x = scale * torch.randn(12, 5, 6, dtype=F64)
        eps = torch.logspace(-2, 0.5, 12, dtype=F64)
        y, bound = perturbation_bound(model, x, eps)
        torch.testing.assert_close(y, model(x))
        found = attack(model, x, eps, steps=30)
        assert bool((found <= bound).all())
        assert (found / bound).max() > 0.05


def test_attention_and_its_residuals_are_lofast() -> None:
    layer, x = attention(), torch.randn(3, 4, 6, dtype=F64)
    delta = torch.tensor([0.0, 0.1, 1.0], dtype=F64)
    for module, residual, scale in (
        (layer, 0.0, 1.0),
        (lf.Residual(layer), 1.0, 1.0),
        (lf.ConvexResidual(layer, 0.25), 0.75, 0.25),
        (nn.Sequential(lf.Residual(layer)), 1.0, 1.0),
    ):
        _, moved = perturbation_bound(module, x, delta)
        expected = lofast_bound(layer, x, delta, residual=residual, scale=scale)
        torch.testing.assert_close(moved, expected, rtol=1e-12, atol=0.0)


def test_the_joint_norm_counts_only_where_the_projection_is_inactive() -> None:
    layer, radius = attention(), 2.0
    x = nn.functional.normalize(torch.randn(3, 4, 6, dtype=F64), dim=-1)
    x = x * torch.tensor([1.0, 1.0, 3.0], dtype=F64)[:, None, None]
    delta = torch.tensor([0.9, 1.1, 0.9], dtype=F64)
    module = lf.Residual(nn.Sequential(lf.BallProjection(radius), layer))
    _, moved = perturbation_bound(module, x, delta)
    joint = lofast_bound(layer, x, delta, residual=1.0)
    apart = delta + lofast_bound(layer, lf.BallProjection(radius)(x), delta)
    torch.testing.assert_close(moved[0], joint[0], rtol=1e-9, atol=0.0)
    torch.testing.assert_close(moved[1:], apart[1:], rtol=1e-9, atol=0.0)
    assert bool((joint[:2] < apart[:2]).all())


def test_the_joint_norm_would_be_wrong_with_an_active_projection() -> None:
    """Negative control: f(x) = -x within the ball and constant outside; x + f(x) moves outside only."""
    layer = Attention(AttentionMaps(torch.zeros(1, 2, 2), -torch.eye(2)[None])).double()
    x = torch.tensor([[[5.0, 0.0]]], dtype=F64)
    delta = torch.tensor([1.0], dtype=F64)
    module = lf.Residual(nn.Sequential(lf.BallProjection(1.0), layer))
    found = attack(module, x, delta, steps=10)
    assert found > lofast_bound(layer, x, delta, residual=1.0) + 0.5
    assert found <= perturbation_bound(module, x, delta)[1]


def test_a_projection_cannot_move_further_than_its_ball_is_wide() -> None:
    x = torch.zeros(1, 4, 3)
    x[0, 0, 0] = 10.0
    _, moved = perturbation_bound(lf.BallProjection(2.0), x, 100.0)
    assert moved.item() == pytest.approx((4.0**2 + 3 * 2.0**2) ** 0.5)


def test_certified_modules_have_their_constant_and_images_pass() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 2, stride=2), nn.Flatten(2), nn.Flatten(), nn.Linear(8, 3))
    images = torch.rand(5, 1, 4, 4)
    y, moved = perturbation_bound(model, images, 0.5)
    assert y.dtype == torch.float32
    assert moved.shape == (5,)
    constant = lf.certify(model.double()).bound
    torch.testing.assert_close(moved, torch.full((5,), 0.5 * constant, dtype=F64), rtol=1e-6, atol=0.0)


def test_l2_attention_is_asked_for_the_length_at_hand() -> None:
    layer = lf.L2MultiheadAttention(6, 2, batch_first=True, value_proj=True)
    delta = torch.tensor([1.0, 1e8], dtype=F64)
    _, moved = perturbation_bound(lf.Residual(layer), torch.randn(2, 5, 6), delta)
    expected = lf.certify(lf.Residual(layer).double(), seq_len=5).bound
    assert moved[0] < expected  # around the input
    torch.testing.assert_close(moved[1], expected * delta[1], rtol=1e-6, atol=0.0)


def test_torch_attention_is_taken_within_samples() -> None:
    layer = nn.MultiheadAttention(6, 2, batch_first=True, dtype=F64)
    x = torch.randn(2, 5, 6, dtype=F64)
    y, moved = perturbation_bound(layer, x, 0.3)
    torch.testing.assert_close(y, layer(x, x, x, need_weights=False)[0])
    torch.testing.assert_close(moved, lofast_bound(layer, x, 0.3))
    with pytest.raises(lf.NotCertifiable, match="batch_first"):
        perturbation_bound(nn.MultiheadAttention(6, 2), x, 0.3)
    dropped = nn.MultiheadAttention(6, 2, dropout=0.1, batch_first=True)
    with pytest.raises(lf.NotCertifiable, match="random in training mode"):
        perturbation_bound(dropped, x, 0.3)
    perturbation_bound(dropped.eval(), x, 0.3)


def test_what_has_no_bound_is_refused_with_its_path() -> None:
    class Unknown(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x**2

    model = nn.Sequential(nn.Identity(), lf.Residual(nn.Sequential(attention(), Unknown())))
    with pytest.raises(lf.NotCertifiable) as caught:
        perturbation_bound(model, torch.randn(2, 3, 6), 0.1)
    assert caught.value.path == "1.branch.1"

    class Doubled(lf.Residual):
        def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
            return 2 * super().forward(x, key_padding_mask)

    with pytest.raises(lf.NotCertifiable, match="overrides the forward"):
        perturbation_bound(Doubled(attention()), torch.randn(2, 3, 6), 0.1)
    hooked = attention()
    hooked.register_forward_hook(lambda module, given, out: 3 * out)
    with pytest.raises(lf.NotCertifiable, match="hook"):
        perturbation_bound(lf.Residual(hooked), torch.randn(2, 3, 6), 0.1)


def test_a_rule_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x**2

    monkeypatch.setattr(perturbation._rules, "_rules", dict(perturbation._rules._rules))

    @register_perturbation(Square)
    def _(module: Square, x: Tensor) -> tuple:
        largest = x.abs().flatten(1).amax(1)
        return module(x), lambda delta: (2 * largest + delta) * delta

    x = torch.randn(4, 3, dtype=F64)
    y, moved = perturbation_bound(nn.Sequential(Square(), nn.Identity()), x, 0.1)
    torch.testing.assert_close(y, x**2)
    assert bool((attack(Square(), x, torch.full((4,), 0.1, dtype=F64)) <= moved).all())
    with pytest.raises(TypeError, match="subclass"):
        register_perturbation(Square())  # type: ignore[arg-type]
