"""What would give a wrong number is refused, with what was given; empty batches are no error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer import analysis
from lipformer.analysis import AttentionMaps, attention_maps, measure_gain, perturbation_bound
from lipformer.layers import BallProjection

EYE = torch.eye(2)[None]
MAPS, CAUSAL = AttentionMaps(EYE, EYE), AttentionMaps(EYE, EYE, causal=True)
X, ONES, WIDE = torch.randn(3, 2), torch.ones(3), torch.randn(3, 4)
MODEL = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).requires_grad_(False)
DROPPED = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(4, 3))
IMAGES, LABELS = torch.randn(5, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1])
ENCODER = nn.MultiheadAttention(2, 1, batch_first=True)
ALIBI = lf.L2MultiheadAttention(4, 2, causal=True, positions="alibi")
FINITE = "finite and not negative, .*"


def radius(**change: Any) -> Tensor:
    return analysis.certified_radius(**{"model": MODEL, "x": IMAGES, "y": LABELS, **change})


def weighted(*weights: float) -> Tensor:
    return measure_gain(MAPS, X, torch.tensor(weights, dtype=torch.float64))


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: analysis.ball_bound(MAPS, 0, 1.0), "at least 1, .* got n=0"),
    (lambda: analysis.adversarial_measure(MAPS, torch.inf), FINITE + "inf"),
    (lambda: analysis.mean_field_bound(MAPS, -1.0), FINITE + "-1"),
    *((lambda r=r: analysis.ball_bound(MAPS, 2, r), FINITE) for r in (torch.nan, torch.inf)),
    *((lambda e=e: analysis.lofast_bound(MAPS, X, e), FINITE) for e in (-1.0, torch.nan)),
    (lambda: analysis.lofast_bound(MAPS, X, torch.ones(7)), "a number or of shape"),
    (
        lambda: analysis.lofast_bound(AttentionMaps(EYE, torch.ones(1, 2, 3)), X, 0.1, residual=1.0),
        "keeps the width",
    ),
    (lambda: analysis.local_bound(MAPS, X, method="best"), "method must be one of .* got 'best'"),
    (lambda: analysis.local_bound(MAPS, WIDE), r"\(\*, N, 2\) with N >= 1, got torch.float32 \(3, 4\)"),
    (lambda: attention_maps(nn.Linear(2, 2)), "got Linear"),
    (lambda: attention_maps(nn.MultiheadAttention(4, 2, kdim=3)), "kdim=3"),
    (lambda: attention_maps(nn.MultiheadAttention(4, 2, add_zero_attn=True)), "add_zero_attn=True"),
    (lambda: AttentionMaps(torch.zeros(2, 3, 4), EYE), r"logits must be \(H, D, D\), .* \(2, 3, 4\)"),
    (lambda: AttentionMaps(EYE, torch.zeros(1, 5, 4)), "got logits of torch.float32"),
    (lambda: AttentionMaps(EYE, EYE, ONES), r"got offset of torch.float32 \(3,\)"),
    (lambda: MAPS.weights(X, torch.zeros(3, 3)), "mask must be bool .* got torch.float32"),
    (lambda: weighted(1.0, 0.0, 1.0), "weights must be positive, finite .* got 0.0"),
    (lambda: weighted(1.0, torch.nan, 1.0), "weights must be positive, finite .* got nan"),
    (lambda: weighted(1.0, 1.0), r"weights must be .* got \(2,\)"),
    (lambda: weighted(1e200, 1e-200, 1.0), "1e-300 of the largest, got 1e-200"),
    (lambda: measure_gain(MAPS, torch.randn(4100, 2), torch.ones(4100)), "4100 tokens of width 2"),
    (lambda: analysis.measure_attention(CAUSAL, X, ONES), "got causal maps"),
    (lambda: analysis.measure_attention(ALIBI, WIDE, ONES), "causal=True, positions='alibi'"),
    (lambda: analysis.split_attack(MAPS, X[None], ONES), r"one cloud \(N, D\), got \(1, 3, 2\)"),
    (
        lambda: analysis.split_attack(MAPS, X, ONES, step=0.0),
        "finite and positive; got 0.0",
    ),
    (lambda: analysis.probe_attention(ENCODER, X[None]), "one sequence"),
    (
        lambda: analysis.probe_attention(
            ENCODER, X, forward=lambda x: ENCODER(*[x.expand(2, -1, -1)] * 3)
        ),
        "on one sequence .* got .2, 3, 2",
    ),
    (lambda: analysis.layer_gains(ENCODER, X), r"tokens must be ids \(B, N\), .* got \(3, 2\)"),
    (lambda: analysis.layer_gains(ENCODER, []), "at least one; got list"),
    (lambda: analysis.layer_gains(ENCODER, [X], lengths=[3, 4]), "one for each sequence, .* got .3, 4"),
    *(
        (
            lambda n=n: analysis.layer_gains(ENCODER, X[None], lengths=[n]),
            "one for each sequence, in 1...3., got ",
        )
        for n in (0, 4)
    ),
    (lambda: analysis.layer_gains(ENCODER, [X], bound="best"), "got 'best'"),
    (
        lambda: analysis.layer_gains(ENCODER, {"input_ids": [[1]]}),
        r"got dict. .* give batch\['input_ids'\]",
    ),
    (lambda: perturbation_bound(nn.Identity(), X, -0.1), "delta must be"),
    (lambda: perturbation_bound(nn.Identity(), X, torch.ones(2)), r"of shape \(3,\), got "),
    (lambda: perturbation_bound(nn.Linear(2, 2), torch.ones(2), 1), r"got torch.float32 \(2,\)"),
    (lambda: radius(model=DROPPED), r"model\.eval\(\)"),
    (lambda: radius(x=IMAGES.to(torch.uint8)), "x must be floating-point .* torch.uint8"),
    *((lambda y=y: radius(y=y), "y must be integer labels") for y in (LABELS[:1], LABELS.float())),
    (lambda: radius(max_radius=0.0), "max_radius must be positive and finite, .* got 0.0"),
    (lambda: analysis.is_certified(MODEL, IMAGES, LABELS, -1.0), "eps must be finite"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[str(k) for k in range(len(REFUSED))])
def test_one_error_with_what_was_given(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError, lf.NotCertifiable), match=message):
        call()


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
