"""Theorem F: the gain on a ball, its lemmas under attack, and the table of its knots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lipformer.functional import l2_gain
from lipformer.functional.gain.ball import (
    FIRST,
    KNOTS,
    STEP,
    Rows,
    any_column,
    ball_gain,
    ball_knots,
    causal_column,
    entry,
    full_column,
    row_factor,
)
from tests.functional.test_gain_attack import (
    NORMS,
    alibi,
    ascend,
    attention_weights,
    compose,
    in_ball,
    jacobian_blocks,
    l2_norm,
    largest,
    largest_of_clusters,
    starting_tokens,
)

RADII = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0)


def test_the_table_of_the_notes() -> None:
    any_number = {0.25: 1.07, 0.5: 1.456, 0.7: 2.303, 1.0: 4.482, 1.4: 9.691, 2.0: 31.0}
    token = {0.25: 1.04, 0.5: 1.34, 0.7: 2.17, 1.0: 4.52, 1.4: 9.24, 2.0: 19.4}
    for r in RADII:
        assert l2_gain(math.inf, radius=r) == pytest.approx(any_number[r], rel=1e-2)
        assert l2_gain(math.inf, norm="token", radius=r) == pytest.approx(token[r], rel=1e-2)
        for n in (16, 64, 256, 1024):
            assert l2_gain(n, radius=r) <= min(1.01 * any_number[r], l2_gain(n))
    causal = [l2_gain(256, is_causal=True, radius=r) for r in (0.25, 0.5, 0.7)]
    assert causal == pytest.approx([2.70, 3.64, 5.89], rel=1e-2)
    steep = [l2_gain(math.inf, is_causal=True, slope=1 / 8, radius=r) for r in (0.25, 0.5, 0.7)]
    assert steep == pytest.approx([1.78, 2.19, 3.13], rel=4e-2)


def test_grows_with_the_radius_and_never_passes_the_gain_without() -> None:
    for norm in ("l2", "token", "self"):
        for options in ({}, {"is_causal": True}, {"is_causal": True, "slope": 0.25}):
            found = [l2_gain(32, norm=norm, radius=0.05 * 1.6**k, **options) for k in range(9)]
            assert all(a <= b * (1 + 1e-4) for a, b in itertools.pairwise(found))
            assert max(found) <= l2_gain(32, norm=norm, **options)
            assert found[0] < 1.02 or options
    assert l2_gain(1, radius=3.0) == 1.0
    alone = torch.full((3, 3), -math.inf).fill_diagonal_(0.0)
    for norm in ("l2", "token", "self"):
        assert l2_gain(3, norm=norm, radius=3.0, bias=alone) == pytest.approx(1.0)
    assert l2_gain(64, radius=1e3) == l2_gain(64)
    assert l2_gain(math.inf, radius=1e3) == math.inf == l2_gain(math.inf, is_causal=True, radius=1.0)


@pytest.mark.parametrize("radius", [0, -1.0, math.nan, "1"])
def test_a_wrong_radius_is_named(radius: Any) -> None:
    with pytest.raises(ValueError, match="radius must be None or a number > 0"):
        l2_gain(4, radius=radius)


def moments(z: Tensor, r: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Mean, beta, t, lambda and tau for a = e_1, query z_0 and weights softmax of the last feature."""
    place, weight = in_ball(z[..., :-1], r), z[..., 1:, -1].softmax(-1)
    delta = place[..., :1, :] - place[..., 1:, :]
    beta = place[..., 1:, 0] - (weight * place[..., 1:, 0]).sum(-1, keepdim=True)
    lam = (weight * beta.square()).sum(-1).clamp(1e-12, r * r)
    tau = 2 * r * r * (1 + (1 - lam / (r * r)).clamp_min(1e-15).sqrt())
    return weight, beta, delta, lam, tau


@pytest.mark.parametrize("r", [0.3, 1.5])
def test_no_attack_passes_the_second_moment(r: float) -> None:
    """E[beta^2 t] <= lambda tau for any weights and places in the ball; it is tight."""

    def ratio(z: Tensor, power: float = 0.5) -> Tensor:
        weight, beta, delta, lam, _ = moments(z, r)
        tau = 2 * r * r * (1 + (1 - lam / (r * r)).clamp_min(1e-15) ** power)
        return (weight * beta.square() * delta.square().sum(-1)).sum(-1) / (lam * tau)

    z = torch.randn(32, 7, 4).double() * torch.tensor([2 * r, r, r, 1.0]).double()
    best, _ = ascend(z, ratio, 150)
    assert 0.97 < best.max() <= 1 + 1e-9
    wrong, _ = ascend(z, lambda z: ratio(z, 1.0), 60)  # negative control: without the root
    assert wrong.max() > 1.01


@pytest.mark.parametrize("y", [0.0, 0.8])
def test_no_attack_passes_the_row_factor(y: float) -> None:
    """E[v' Omega^-1 v] <= 1 + lambda (4 tau - 4 - y)/(1 + y tau), and Theta is above it."""
    for r in (0.4, 1.0, 1.6):

        def value(z: Tensor, r: float = r) -> tuple[Tensor, Tensor]:
            weight, beta, delta, lam, tau = moments(z, r)
            t = delta.square().sum(-1)
            along = delta[..., 0] + 2 * beta * t  # v . delta
            squared = 1 + 4 * beta * delta[..., 0] + 4 * beta.square() * t
            inner = squared - y * along.square() / (1 + y * t)
            return (weight * inner).sum(-1), 1 + lam * (4 * tau - 4 - y) / (1 + y * tau)

        z = torch.randn(48, 6, 4).double() * torch.tensor([2 * r, r, r, 1.0]).double()
        best, where = ascend(z, lambda z, value=value: torch.div(*value(z)), 100)
        # Tight: negative control for whatever is a hundredth smaller, such as without -4 - y.
        assert 0.99 < best.max() <= 1 + 1e-9
        number = torch.tensor([[y]]).double()
        theta = row_factor(torch.tensor([[r]]).double(), number, number + 1e12, math.inf, 400)
        assert (value(where)[0] <= theta).all()


def column_sums(z: Tensor, b: Tensor, y: float) -> Tensor:
    """max_j sum_i P_ij (1 + y s_ij^2) of each start."""
    p, _ = attention_weights(z, b)
    offset = z[..., :, None, :] - z[..., None, :, :]
    second = torch.einsum("rij,rija,rijb->rjab", p, offset, offset)
    top = torch.linalg.eigh(second.detach()).eigenvectors[..., -1]
    along = torch.einsum("rja,rjab,rjb->rj", top, second, top)
    return (p.sum(-2) + y * along).amax(-1)


@pytest.mark.parametrize("y", [0.0, 1.2])
def test_no_attack_passes_the_column_sums(y: float) -> None:
    n, d, count, number = 12, 3, 6, torch.tensor([[y]]).double()
    closest: dict[str, float] = {}
    for r in (0.4, 1.2):
        radius = torch.tensor([[r]]).double()
        padded = torch.rand(n) < 0.4
        holes = torch.zeros(n, n).double().masked_fill(padded[:, None] | padded, -math.inf)
        hub = torch.full((n, n), -math.inf).double().fill_diagonal_(0.0)
        hub[:, 0] = 0.0
        columns = {
            "none": (torch.zeros(n, n).double(), full_column),
            "causal": (alibi(n), causal_column(n, 0.0)),
            "holes": (alibi(n, 0.3) + holes, causal_column(n, 0.3)),
            "window": (alibi(n, window=4) + holes, causal_column(4, 0.0)),
            "slope": (alibi(n, 0.3), causal_column(math.inf, 0.3)),
            "any": (hub, any_column(n)),
        }
        b = torch.stack([b.fill_diagonal_(0.0) for b, _ in columns.values()]).repeat_interleave(count, 0)
        z = torch.cat([starting_tokens(n, d, count, r) for _ in columns])
        best, _ = ascend(z, lambda z, b=b, r=r: column_sums(in_ball(z, r), b, y), 40)
        for (name, (_, column)), top in zip(columns.items(), best.split(count), strict=True):
            bound = column(radius, number).item()
            assert top.max() <= bound * (1 + 1e-9), (name, r)
            closest[name] = max(closest.get(name, 0.0), top.max().item() / bound)
        # Negative controls: without kappa, and as if each row saw all n keys.
        assert best[:count].max() > 0.5 * math.exp(r * r) * math.sqrt(1 + y * y / 2) or r > 1
        alone = 1 + (n - 1) * entry(torch.full_like(radius, n - 1), 4 * radius**2, number)
        assert best[count : 2 * count].max() > alone
    assert min(closest.values()) > 0.6, closest


def test_an_entry_is_the_maximum_over_distances() -> None:
    c, y = (
        torch.tensor([1e-3, 0.2, 1.0, 7.0, 400.0]).double(),
        torch.tensor([[0.0], [0.3], [2.0], [9.0]]),
    )
    for t_max in (0.05, 1.0, 9.0):
        t = torch.linspace(0, t_max, 20001, dtype=torch.float64)
        y3, c3 = y.double()[:, :, None], c[None, :, None]
        brute = ((1 + y3 * t) / (1 + c3 * t.exp())).amax(-1)
        found = entry(c, torch.tensor([[t_max]]).double(), y.double())
        assert (brute <= found).all()
        assert (found <= brute * (1 + 1e-6)).all()


@pytest.mark.parametrize(
    ("n", "d", "r"), [(2, 1, 1.0), (3, 2, 0.5), (6, 2, 0.25), (8, 2, 0.8), (12, 2, 1.3)]
)
def test_no_attack_passes_a_bound(n: int, d: int, r: float) -> None:
    bounds = largest(n, d, 6, 20, r)
    for (norm, mask), (top, bound) in bounds.items():
        assert top >= 0.99  # the attack is alive
        if mask == "none":
            assert bound <= l2_gain(n, norm=norm)


@pytest.mark.parametrize(
    ("norm", "r", "share"), [("l2", 0.5, 0.8), ("token", 0.5, 0.9), ("self", 1.5, 0.5)]
)
def test_attack_breaks_the_bound_of_a_smaller_ball(norm: str, r: float, share: float) -> None:
    n = 9
    objective = compose(NORMS[norm], torch.zeros(n, n).double(), r)
    best, _ = ascend(starting_tokens(n, 2, 12, r), objective, 60)
    assert l2_gain(n, norm=norm, radius=share * r) < best.max() <= l2_gain(n, norm=norm, radius=r)


def test_a_lower_mass_would_break_under_padding() -> None:
    """Nine rows see one key with bias ln 1000; what else they see is padded."""
    n, r = 10, 0.01
    b = torch.full((n, n), -math.inf).double().fill_diagonal_(0.0)
    b[1:, 0] = math.log(1000.0)
    z = in_ball(torch.randn(4, n, 2).double(), r)
    reached = l2_norm(jacobian_blocks(z, b)).max()
    others = torch.full((n, n), math.log(1000.0)).double().fill_diagonal_(0.0)
    assert 3.1 < reached <= l2_gain(n, bias=b, radius=r) <= l2_gain(n, bias=others, radius=r)


@pytest.mark.parametrize("r", [0.4, 1.5])
def test_clusters_of_up_to_a_million_tokens(r: float) -> None:
    found = largest_of_clusters(10**6, 12, 25, r)
    for norm, share in (("l2", 0.3 if r > 1 else 0.8), ("token", 0.8), ("self", 0.8 if r > 1 else 0.2)):
        top, bound = found[norm, "none"]
        assert bound == pytest.approx(l2_gain(math.inf, norm=norm, radius=r), rel=0.05)
        assert top > share * bound


ROWS: list[Rows] = [
    Rows("l2", math.inf, "none"),
    Rows("l2", 64.0, "causal"),
    Rows("l2", math.inf, "causal", 0.25),
    Rows("l2", 16.0, "any"),
    Rows("token", 64.0, "causal"),
    Rows("self", math.inf, "causal", 0.5),
]


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_lines_between_the_knots_are_above_the_theorem_and_close(rows: Rows) -> None:
    value: Callable[[int], float] = ball_knots(rows).__getitem__
    for x in [0.0, *(torch.rand(12).double() * (KNOTS - 1.001)).tolist()]:
        k = int(x)
        line = value(k) + (x - k) * (value(k + 1) - value(k))
        exact = ball_gain(rows, math.exp(FIRST + STEP * x))
        assert exact <= line <= 1.03 * exact + 0.02 or x > 27  # beyond, the lines are coarse
        assert exact <= line
