"""Lambert W against SciPy and against its defining equation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import lambertw, wrightomega

from lipformer.functional.gain.lambertw import lambert_w0, wright_omega, wright_omega_tensor

ULPS = 8 * 2.0**-52


def test_agrees_with_scipy_over_the_range_of_floats() -> None:
    x = np.concatenate([10 ** np.linspace(-300, 300, 4001), np.linspace(0.01, 10, 2001)])
    ours = np.array([lambert_w0(v) for v in x])
    assert np.abs(ours / lambertw(x).real - 1).max() < ULPS


def test_negative_branch_solves_the_equation() -> None:
    # W' = W / (x (1 + W)) blows up at -1/e, so the equation is checked, not the value.
    x = -np.exp(-np.linspace(1.0, 40, 500)) + 0.0
    for v in x[1:]:
        w = lambert_w0(v)
        assert w >= -1
        assert abs(w * math.exp(w) - v) <= 4 * ULPS * abs(v)
    assert lambert_w0(-1 / math.e) == pytest.approx(-1, abs=1e-7)


def test_special_values() -> None:
    assert lambert_w0(0.0) == 0.0
    assert lambert_w0(math.inf) == math.inf
    assert lambert_w0(5e-324) == 5e-324
    assert lambert_w0(math.e) == pytest.approx(1.0, rel=ULPS)
    assert wright_omega(-math.inf) == 0.0
    assert wright_omega(math.inf) == math.inf
    assert wright_omega(1.0) == pytest.approx(1.0, rel=ULPS)


@pytest.mark.parametrize("x", [-1.0, -0.3679, -math.inf, math.nan])
def test_outside_the_domain(x: float) -> None:
    with pytest.raises(ValueError, match=r"x >= -1/e"):
        lambert_w0(x)
    with pytest.raises(ValueError, match="nan"):
        wright_omega(math.nan)


def test_omega_agrees_with_scipy() -> None:
    y = np.concatenate([np.linspace(-600, 600, 1201), np.linspace(-3, 4, 701), [1e4, 1e8, 1e300]])
    ours = np.array([wright_omega(v) for v in y])
    assert np.abs(ours / wrightomega(y) - 1).max() < 4 * ULPS


def test_omega_of_a_tensor_agrees_with_the_scalar_one() -> None:
    y = torch.cat([torch.linspace(-690, 690, 691), torch.linspace(-3, 4, 701)]).double()
    expected = torch.tensor([wright_omega(v) for v in y.tolist()], dtype=torch.float64)
    narrow = wright_omega_tensor(y.float().requires_grad_())
    assert narrow.dtype == torch.float64
    assert not narrow.requires_grad
    error = (wright_omega_tensor(y) / expected - 1).abs()
    assert bool((error <= 2.0**-51 * y.abs().clamp_min(8)).all())
    extremes = wright_omega_tensor(torch.tensor([-math.inf, -740.0, 1e300], dtype=torch.float64))
    assert extremes[0] == 0
    assert 0 < extremes[1] < 1e-300
    assert extremes[2] == pytest.approx(1e300)
