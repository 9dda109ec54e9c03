"""Bad input of any type gets one error that says what was given; empty batches are no error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lipformer import analysis
from lipformer.analysis import AttentionMaps, perturbation_bound
from lipformer.layers import BallProjection

MAPS = AttentionMaps(torch.eye(2)[None], torch.eye(2)[None])
X, ONES = torch.randn(3, 2), torch.ones(3)
MODEL = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).requires_grad_(False)
IMAGES, LABELS = torch.randn(5, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1])
ENCODER = nn.MultiheadAttention(2, 1, batch_first=True)

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "n=True": (lambda: analysis.ball_bound(MAPS, True, 1.0), "n must be an integer >= 1, got True"),
    "n, lower": (lambda: analysis.ball_lower_bound(MAPS, 2.5, 1.0), "got 2.5"),
    **{
        f"radius={bad!r}": (
            lambda bad=bad: analysis.ball_bound(MAPS, 2, bad),
            "radius must be finite and not negative, got ",
        )
        for bad in ("1", None, 1j, True, float("nan"), torch.ones(2))
    },
    **{
        f"eps={bad!r}": (
            lambda bad=bad: analysis.lofast_bound(MAPS, X, bad),
            "eps must be finite and not negative, got ",
        )
        for bad in ("1", None, 1j, True, torch.ones((), dtype=torch.bool), [0.1])
    },
    "x list": (lambda: analysis.local_bound(MAPS, [[1.0, 2.0]]), "got list"),
    "x None": (lambda: analysis.split_gain(MAPS, None, ONES), "got NoneType"),
    "x width": (lambda: analysis.split_gain(MAPS, torch.ones(3, 4), ONES), "got width 4"),
    "weights None": (lambda: analysis.split_gain(MAPS, X, None), "got NoneType"),
    "integer maps": (
        lambda: AttentionMaps(torch.ones(1, 2, 2, dtype=torch.long), torch.ones(1, 2, 2)),
        "logits must be a floating-point tensor, got torch.int64",
    ),
    "no maps": (lambda: AttentionMaps(None, torch.ones(1, 2, 2)), "logits .* got NoneType"),
    "vector": (lambda: perturbation_bound(nn.Linear(2, 2), torch.ones(2), 1), r"got \(2,\)"),
    "scalar": (lambda: perturbation_bound(nn.Linear(2, 2), torch.ones(()), 1), r"got \(\) of"),
    "integers": (
        lambda: perturbation_bound(nn.Identity(), torch.ones(2, 2, dtype=torch.long), 1),
        "torch.int64",
    ),
    "delta": (lambda: perturbation_bound(nn.Identity(), X, torch.ones(2)), r"shape \(3,\), got \(2,\)"),
    "pixels": (
        lambda: analysis.certified_radius(MODEL, IMAGES.to(torch.uint8), LABELS),
        "x must be floating-point .* torch.uint8",
    ),
    "images None": (lambda: analysis.certified_radius(MODEL, None, LABELS), "x must be .* got NoneType"),
    "labels list": (lambda: analysis.certified_radius(MODEL, IMAGES, [0] * 5), r"got \[0, 0"),
    "max_radius": (
        lambda: analysis.certified_radius(MODEL, IMAGES, LABELS, max_radius="1"),
        "max_radius must be positive and finite, got '1'",
    ),
    "accuracy": (
        lambda: analysis.certified_accuracy(MODEL, IMAGES, LABELS, 0.1),
        "eps must be a sequence of radii, got 0.1",
    ),
    "levels": (
        lambda: analysis.certified_accuracy(MODEL, IMAGES, LABELS, [torch.ones(5)]),
        "eps must be finite and not negative, got tensor",
    ),
    **{
        f"length {bad!r}": (
            lambda bad=bad: analysis.layer_gains(ENCODER, X[None], lengths=[bad]),
            "a length must be an integer in 1..3, got ",
        )
        for bad in (2.7, "2", True, None, 0, torch.tensor(2.0))
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_one_error_with_what_was_given(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_types_of_models_and_masks() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got NoneType"):
        analysis.certified_radius(None, IMAGES, LABELS)
    with pytest.raises(TypeError, match=r"mask must be bool .* got list"):
        analysis.local_bound(MAPS, X, [[True] * 3] * 3)


def test_numbers_of_other_types_are_numbers() -> None:
    assert analysis.ball_bound(MAPS, 2, torch.tensor(1.0)) == analysis.ball_bound(MAPS, 2, 1)
    assert torch.equal(
        analysis.lofast_bound(MAPS, X, torch.tensor(0.5)), analysis.lofast_bound(MAPS, X, 0.5)
    )
    assert len(analysis.layer_gains(ENCODER, X[None], lengths=torch.tensor([2])).rows) == 1


def test_empty_batches() -> None:
    none, labels = IMAGES[:0], LABELS[:0]
    assert analysis.certified_radius(MODEL, none, labels).shape == (0,)
    certain = analysis.is_certified(MODEL, none, labels, 0.1)
    assert certain.shape == (0,)
    assert certain.dtype == torch.bool
    assert perturbation_bound(BallProjection(1.0), torch.zeros(0, 4), 0.1)[1].shape == (0,)


def test_a_ball_holds_vectors() -> None:
    def project(x: Tensor) -> Tensor:
        return BallProjection(1.0)(x)

    x = 2 * torch.randn(50, 4, dtype=torch.float64)
    for delta in (0.1, 1.0, 10.0):
        y, moved = perturbation_bound(BallProjection(1.0), x, delta)
        assert torch.equal(y, project(x))
        away = torch.nn.functional.normalize(torch.randn(200, 50, 4, dtype=torch.float64), dim=-1)
        reached = (project(x + delta * away) - y).norm(dim=-1).amax(0)
        assert bool((reached <= moved * (1 + 1e-12)).all())  # the attack rounds too
        assert bool((moved <= 2.0 * (1 + 1e-9)).all())


def test_is_certified_keeps_the_order_of_batches() -> None:
    radius = analysis.certified_radius(MODEL, IMAGES, LABELS)
    within = analysis.is_certified(MODEL, IMAGES, LABELS, 0.9 * radius, batch_size=2)
    assert torch.equal(within, radius > 0)
