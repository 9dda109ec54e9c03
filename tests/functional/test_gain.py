"""l2_gain: its maxima, its options and its errors.

Its values are the tables of docs/theory, which test_docs.py compares; test_gain_attack.py attacks it.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import lambertw

from lipformer.functional.gain.interval import Interval
from lipformer.functional.gain.minimum import _Question, _scalar_theorems, l2_gain
from lipformer.functional.gain.pointwise import max_of_concave, pointwise
from lipformer.functional.gain.row_factor import Cells
from lipformer.functional.gain.rows import row_spread
from lipformer.functional.gain.table import read_table, tabulated_any, tabulated_gain
from lipformer.functional.gain.theorem_g import Mask, theorem_g
from recipes.gains.search import verify

LENGTHS = [2, 3, 4, 5, 8, 12, 16, 17, 40, 64, 100, 1000, 10**4, 10**6, 10**12]
SLOPES = [20.0, 3.0, 1.0, 0.5, 0.25, 1 / 8, 1 / 16, 1 / 32, 1 / 256, 1e-5]


@pytest.mark.parametrize("is_causal", [False, True])
def test_none_is_the_smallest_of_all_theorems(is_causal: bool) -> None:
    for slope in [0.0, *SLOPES] if is_causal else [0.0]:
        for n in [*LENGTHS, math.inf] if slope else LENGTHS:
            theorems = _scalar_theorems(_Question(float(n), "l2", is_causal, False, slope, None, None))
            smallest = min(evaluate() for evaluate in theorems.values())
            gain = l2_gain(n, is_causal=is_causal, slope=slope)
            assert gain == pytest.approx(smallest, rel=1e-9), (n, slope)


def test_grows_with_the_length_and_falls_with_the_slope() -> None:
    lengths = [*range(1, 130), *(2**k for k in range(8, 30))]
    for options in [{}, {"is_causal": True}, {"norm": "token"}, {"norm": "self"}]:
        gains = [l2_gain(n, **options) for n in lengths]  # type: ignore[arg-type]
        assert gains == sorted(gains), options
    for slope in (0.5, 0.03):
        gains = [l2_gain(n, is_causal=True, slope=slope) for n in [*range(1, 40), 10**6, math.inf]]
        assert gains == sorted(gains)
    for n in (5, 64, 1000):
        gains = [l2_gain(n, is_causal=True, slope=s) for s in [0.0, *reversed(SLOPES)]]
        assert np.diff(gains).max() < 1e-6


def test_one_key_is_the_identity() -> None:
    assert l2_gain(2) <= 1.82  # a regression mark of Theorem G where docs/theory has none
    for norm in ("l2", "token", "self"):
        assert l2_gain(1, norm=norm) == 1.0
        assert l2_gain(1, norm=norm, bias=torch.zeros(1, 1)) == pytest.approx(1, abs=1e-11)
        assert l2_gain(1, norm=norm, bias=torch.zeros(1, 1)) >= 1
        assert l2_gain(math.inf, norm=norm, is_causal=True, window=1) == 1.0


def test_window_replaces_the_length() -> None:
    for norm in ("l2", "token", "self"):
        plain = l2_gain(50, norm=norm, is_causal=True)
        assert l2_gain(50, norm=norm, is_causal=True, window=50) == plain
        assert l2_gain(50, norm=norm, is_causal=True, window=999) == plain
        assert l2_gain(math.inf, norm=norm, is_causal=True, window=50) == plain
        assert l2_gain(50, norm=norm, is_causal=True, window=7) == l2_gain(7, norm=norm, is_causal=True)


def test_any_length_without_window_or_slope_has_no_bound() -> None:
    for theorem in (None, "G", "closed", "any mask", "kim2021"):
        assert l2_gain(math.inf, theorem=theorem) == math.inf
    assert l2_gain(math.inf, norm="token") == math.inf
    assert l2_gain(math.inf, is_causal=True, slope=0.0) == math.inf


def test_row_spread_is_lambert_w_rounded_up() -> None:
    for n in (2, 3, 17, 1000, 10**9):
        exact = lambertw((n - 1) / math.e).real
        assert exact <= row_spread(n) <= exact * (1 + 3e-12)
    assert row_spread(1) == 0
    assert row_spread(math.inf) == math.inf


# -- Theorem G and its table -------------------------------------------------------------------


def test_gains_are_those_of_theorem_g() -> None:
    # What coarser cells gave when the theorem was found; the table is at most 5% lower.
    gains = {
        (64, False): 9.08,
        (256, False): 13.47,
        (1024, False): 18.74,
        (64, True): 9.64,
        (256, True): 14.91,
        (1024, True): 22.64,
    }
    for (n, is_causal), gain in gains.items():
        assert 0.95 * gain <= l2_gain(n, is_causal=is_causal) <= 1.005 * gain
    for slope, gain in [(1 / 2, 2.13), (1 / 4, 3.00), (1 / 8, 4.19), (1 / 16, 5.70)]:
        assert 0.95 * gain <= l2_gain(math.inf, is_causal=True, slope=slope) <= 1.005 * gain
    assert 0.95 * 10.38 <= l2_gain(64, theorem="any mask") <= 1.005 * 10.38


def test_entries_of_the_table_are_proved_again() -> None:
    ratios = verify(stride=331)
    assert len(ratios) > 10
    assert all(0.999 < ratio <= 1 for ratio in ratios)


def test_a_value_between_entries_is_one_of_the_next_worse_entry() -> None:
    table = read_table()
    for is_causal, entries in ((False, table.none), (True, table.causal)):
        keys = [entry.key for entry in entries]
        assert keys == sorted(keys)
        assert [entry.gain for entry in entries] == sorted(entry.gain for entry in entries)
        for low, high in pairwise(entries):
            for n in {low.key + 1, (low.key + high.key) // 2 + 1, high.key}:
                exact = min(high.gain, tabulated_any(n - 1, n - 1))
                assert tabulated_gain(n, is_causal) == exact
        assert tabulated_gain(keys[-1] + 1, is_causal) == math.inf
    for steep, flat in pairwise(table.alibi):
        mass = 1 / math.expm1((steep.key + flat.key) / 2)
        exact = min(flat.gain, tabulated_any(mass, mass))
        assert tabulated_gain(math.inf, True, (steep.key + flat.key) / 2) == pytest.approx(
            exact, rel=1e-9
        )
        assert flat.gain >= steep.gain
    for low, high in pairwise(table.any):
        for ratio in (0.1, 1.0, 3.0, 100.0):
            between = tabulated_any((low.mass + high.mass) / 2, ratio * high.mass)
            assert between == tabulated_any(high.mass, ratio * high.mass)


def test_interpolated_entries_are_near_the_theorem_at_their_own_length() -> None:
    # 100 keys is no entry: the theorem itself, with the parameters of the next one, is a little lower.
    entry = next(entry for entry in read_table().none if entry.key >= 100)
    own = theorem_g(Mask("none", 99), entry.x, entry.e)
    assert own <= l2_gain(100) <= 1.02 * own


def test_coarser_cells_give_a_larger_bound() -> None:
    mask = Mask("causal", 15)
    fine = theorem_g(mask, 0.9, 0.5, Cells(15, 200, 1000))
    coarse = theorem_g(mask, 0.9, 0.5, Cells(15, 100, 300))
    sampled = theorem_g(mask, 0.9, 0.5, Cells(15, 200, 1000, sampled=True))
    assert sampled < fine < coarse


def test_intervals_enclose_the_exact_result() -> None:
    generator = np.random.default_rng(0)
    a, b = (torch.tensor(generator.normal(size=200) * 10 ** generator.uniform(-8, 8, 200)) for _ in "ab")
    for x, y in ((a, b), (a.abs(), b.abs())):
        results = {"+": Interval.of(x) + Interval.of(y), "*": Interval.of(x) * Interval.of(y)}
        results["-"] = Interval.of(x) - Interval.of(y)
        results["/"] = Interval.of(x) / Interval.of(y.abs())
        for sign, result in results.items():
            for low, high, p, q in zip(
                *(v.tolist() for v in (result.low, result.high, x, y)), strict=True
            ):
                f, g = Fraction(p), Fraction(q)
                exact = {"+": f + g, "-": f - g, "*": f * g, "/": f / abs(g)}[sign]
                assert Fraction(low) <= exact <= Fraction(high)
    wide = Interval.of(torch.tensor([-2.0, 1.0]), torch.tensor([3.0, 2.0]))
    assert wide.square().low.tolist() == [0, pytest.approx(1)]
    assert wide.square().high.tolist() == [pytest.approx(9), pytest.approx(4)]
    assert (wide * wide).low.tolist() == [pytest.approx(-6), pytest.approx(1)]


def test_elementary_functions_of_intervals_enclose_the_exact_result() -> None:
    mpmath = pytest.importorskip("mpmath")  # comes with torch
    points = torch.tensor(np.random.default_rng(0).uniform(1e-3, 60, 400))
    with mpmath.workdps(40):
        for name in ("exp", "log", "cosh", "sqrt"):
            result = getattr(Interval.of(points), name)()
            for low, high, p in zip(
                result.low.tolist(), result.high.tolist(), points.tolist(), strict=True
            ):
                exact = getattr(mpmath, name)(mpmath.mpf(p))
                assert mpmath.mpf(low) <= exact <= mpmath.mpf(high)


def test_max_of_concave_is_above_and_close() -> None:
    for shift in (-3.7, 0.0, 20.3):

        def parabola(v: float, shift: float = shift) -> tuple[float, float]:
            return -((v - shift) ** 2), -2 * (v - shift)

        bound = max_of_concave(parabola, 9.0)
        exact = -(max(0.0, shift - 9.0) ** 2)
        assert exact <= bound <= exact + 1e-10


@pytest.mark.parametrize("x", [0.7, 1.6, 4.0, 6.0])
def test_pointwise_entry_against_brute_force(x: float) -> None:
    for log_b in (-3.0, 0.0, 2.5, 9.0):
        q = pointwise(x, log_b)
        u = np.exp(np.linspace(log_b - 30, log_b, 60_001))
        ratio = u * (1 + x * (log_b - np.log(u))) / (1 + u) ** 2
        best_from = np.maximum.accumulate(ratio[::-1])[::-1]  # over D >= 1 + k
        for b in (log_b, log_b - 0.3, log_b - 1, q.linear, log_b - 5):
            if b > log_b:
                continue
            k, best = u[u <= math.exp(b)], best_from[u <= math.exp(b)]
            brute = (best * k * (1 + 4 / x * (b - np.log(k)))).max()
            assert brute * (1 - 1e-9) <= q.entry(b) <= brute * (1 + 1e-3)


# -- dense biases ------------------------------------------------------------------------------


def causal_bias(n: int, slope: float = 0.0, window: int | None = None) -> torch.Tensor:
    distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
    hidden = (distance < 0) | (distance >= (window or n))
    return (-slope * distance.double()).masked_fill(hidden, -math.inf)


def test_dense_bias_of_alibi_is_near_the_formula() -> None:
    for norm, rel in [("l2", 0.03), ("token", 1e-9), ("self", 1e-9)]:
        for slope, window in [(0.5, None), (0.1, 20)]:
            options: dict[str, Any] = {"norm": norm}
            expected = l2_gain(40, is_causal=True, slope=slope, window=window, **options)
            dense = l2_gain(40, bias=causal_bias(40, slope, window), **options)
            assert dense == pytest.approx(expected, rel=rel)
            added = l2_gain(
                40, is_causal=True, slope=slope, window=window, bias=torch.zeros(()), **options
            )
            assert added == pytest.approx(dense, rel=1e-12)


def test_dense_theorem_c_is_its_formula() -> None:
    b = torch.randn(9, 9).double() * 2
    b.fill_diagonal_(0)
    e = b.exp().numpy()
    off = 1 - np.eye(9)
    m = lambertw((e * off).sum(1).max() / math.e).real
    s = 1 + (e / (1 + e) * off).sum(0).max()
    c = (lambertw(e / math.e).real * off).sum(0).max()
    expected = math.sqrt(s) + 2 * m + 2 * math.sqrt(m * c)
    assert l2_gain(9, bias=b, theorem="C") == pytest.approx(expected, rel=1e-11)
    token = 1 + 4 * lambertw((e * off).sum(1).max() * math.exp(-1.5)).real
    assert l2_gain(9, norm="token", bias=b) == pytest.approx(token, rel=1e-11)


def test_diagonal_is_taken_off_its_row() -> None:
    b = torch.randn(6, 6).double()
    b.fill_diagonal_(0)
    shifted = b + torch.randn(6, 1).double()
    for norm in ("l2", "token", "self"):
        expected = l2_gain(6, norm=norm, bias=b)
        assert l2_gain(6, norm=norm, bias=shifted) == pytest.approx(expected, rel=1e-9)


def test_batched_bias_gets_the_largest_gain() -> None:
    batch = torch.randn(2, 3, 5, 5)
    for norm in ("l2", "token", "self"):
        single = max(l2_gain(5, norm=norm, bias=b) for b in batch.reshape(-1, 5, 5))
        assert l2_gain(5, norm=norm, bias=batch) == single


def test_bias_that_is_a_plain_mask_gets_the_mask_s_theorems() -> None:
    assert l2_gain(40, bias=torch.zeros(1, 40)) == l2_gain(40)
    assert l2_gain(40, bias=causal_bias(40)) == l2_gain(40, is_causal=True)
    assert l2_gain(40, bias=torch.zeros(40, 40), is_causal=True) == l2_gain(40, is_causal=True)
    hidden = causal_bias(40)
    hidden[7, 3] = -math.inf  # no longer causal: the kernel argument is lost
    assert l2_gain(40, bias=hidden) > l2_gain(40, is_causal=True)


def test_huge_biases_stay_finite() -> None:
    b = torch.zeros(4, 4)
    b[0, 1], b[2, 3] = 5000.0, -5000.0
    for norm in ("l2", "token", "self"):
        assert 5000 < l2_gain(4, norm=norm, bias=b) < 1e5


def test_is_a_constant_for_torch_compile() -> None:
    def normalised(x: torch.Tensor) -> torch.Tensor:
        return x / l2_gain(x.shape[-2], is_causal=True, slope=0.25)

    compiled = torch.compile(normalised, fullgraph=True, backend="eager")
    for n in (6, 7, 8):
        x = torch.ones(n, 2)
        assert torch.equal(compiled(x), normalised(x))


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be an integer >= 1"),
        ({"norm": "linf"}, "l2, token, self, got 'linf'"),
        ({"theorem": "B"}, r"'G'.*got 'B'"),
        ({"theorem": "any mask", "is_causal": True, "slope": 1.0}, "'closed'; got 'any mask'"),
        ({"theorem": "kim2021", "is_causal": True, "window": 3}, "got 'kim2021'"),
        ({"theorem": "D", "norm": "self"}, "'E'; got 'D'"),
        ({"theorem": "any mask", "bias": torch.zeros(8, 8)}, r"'C', 'C\+'; got 'any mask'"),
        ({"window": 3}, "is_causal"),
        ({"window": 0, "is_causal": True}, "window.*0"),
        ({"slope": 0.5}, "is_causal"),
        *(({"slope": s, "is_causal": True}, f"slope.*{s}") for s in (-0.5, math.nan)),
        ({"bias": torch.zeros(7, 7)}, r"\(\*, N, N\).*\(7, 7\)"),
        ({"bias": torch.full((8, 8), math.nan)}, "nan"),
        ({"bias": torch.full((8, 8), math.inf)}, "got inf"),
        ({"bias": torch.zeros(8, 8).fill_diagonal_(-math.inf)}, "own key"),
        ({"bias": torch.zeros(8, 8), "n": math.inf}, "N = n finite, got n=inf"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        l2_gain(**{"n": 8, **options})


def test_a_bool_mask_is_no_bias() -> None:
    with pytest.raises(ValueError, match=r"torch\.bool"):
        l2_gain(8, bias=torch.ones(8, 8, dtype=torch.bool))


def test_integer_likes_are_numbers_of_tokens() -> None:
    assert l2_gain(np.int64(64)) == l2_gain(64)
    assert l2_gain(64, is_causal=True, slope=np.float32(0.25)) == l2_gain(64, is_causal=True, slope=0.25)
