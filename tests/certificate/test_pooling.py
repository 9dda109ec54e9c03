"""certify's rules for torch's pooling layers and GroupNorm, against dense Jacobians."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from tests.oracles import dense_jacobian


def l2_and_linf(module: nn.Module, x: Tensor) -> dict[str, float]:
    jacobian = dense_jacobian(module, x)
    l2 = torch.linalg.matrix_norm(jacobian, 2).item()
    return {"l2": l2, "linf": jacobian.abs().sum(-1).max().item()}


def check(module: nn.Module, x: Tensor, at_most: float) -> float:
    """The bound holds, and is at most so many times the gain at x; returns the ratio in l2."""
    for norm, found in l2_and_linf(module, x).items():
        bound = lf.certify(module, norm=norm).bound
        assert found <= bound * (1 + 1e-12), (module, norm)
        assert bound <= at_most * found, (module, norm)
    return lf.certify(module).bound / l2_and_linf(module, x)["l2"]


SETTINGS = [
    {"kernel_size": k, "stride": s, "padding": p, "ceil_mode": c}
    for k, s, p, c in itertools.product((1, 2, 3), (1, 2, 3), (0, 1), (False, True))
    if 2 * p <= k
]


@pytest.mark.parametrize("include", [True, False])
def test_avg_pool(include: bool) -> None:
    for options in SETTINGS:
        for size in (3, 6, 7):
            module = nn.AvgPool1d(count_include_pad=include, **options)
            check(module, torch.zeros(1, 1, size, dtype=torch.float64), 3.1)
    # Patches that fit in: the bound is reached.
    for kernel in (2, 3):
        zeros = torch.zeros(1, 2, 6, dtype=torch.float64)
        assert check(nn.AvgPool1d(kernel), zeros, 1 + 1e-9) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 2},
        {"kernel_size": (3, 2), "stride": (2, 1)},
        {"kernel_size": 3, "stride": 1, "padding": 1, "count_include_pad": False},
        {"kernel_size": 2, "divisor_override": 1},
        {"kernel_size": 3, "stride": 2, "divisor_override": 5, "ceil_mode": True},
    ],
    ids=str,
)
def test_avg_pool_in_two_dimensions(options: dict[str, Any]) -> None:
    check(nn.AvgPool2d(**options), torch.zeros(1, 2, 6, 5, dtype=torch.float64), 3.1)
    if "divisor_override" not in options:
        check(nn.AvgPool3d(2), torch.zeros(1, 1, 2, 4, 2, dtype=torch.float64), 1 + 1e-9)


def test_max_pool() -> None:
    for options in SETTINGS:
        for dilation in (1, 2):
            module = nn.MaxPool1d(dilation=dilation, **options)
            # A hill is the maximum of every patch that holds it: the bound is reached there.
            x = -torch.arange(9, dtype=torch.float64).sub(4).abs().reshape(1, 1, 9)
            gains = l2_and_linf(module, x)
            assert gains["l2"] <= lf.certify(module).bound * (1 + 1e-12), module
            assert gains["linf"] <= lf.certify(module, norm="linf").bound == 1.0
    for kernel, stride in ((2, 1), (3, 1), (3, 2), (2, 2)):
        module = nn.MaxPool2d(kernel, stride)
        x = torch.zeros(1, 1, 5, 5, dtype=torch.float64)
        x[0, 0, 2, 2] = 1.0
        assert l2_and_linf(module, x)["l2"] == pytest.approx(lf.certify(module).bound)
    assert lf.certify(nn.MaxPool3d(2)).bound == 1.0


def test_adaptive_pools() -> None:
    x = torch.randn(1, 2, 1, dtype=torch.float64)
    for module in (nn.AdaptiveAvgPool1d(1), nn.AdaptiveMaxPool1d(1)):
        assert check(module, x, 1 + 1e-9) == pytest.approx(1.0)  # one pixel: the bound is reached
        check(module, torch.randn(1, 2, 4, dtype=torch.float64), 2.1)
    for module in (nn.AdaptiveAvgPool2d(3), nn.AdaptiveMaxPool2d((1, None)), nn.AdaptiveAvgPool1d(2)):
        assert lf.certify(module, norm="linf").bound == 1.0
        with pytest.raises(lf.NotCertifiable, match="depends on the number of pixels"):
            lf.certify(module)
    # More pixels than there are: a refusal is due.
    few = torch.randn(1, 1, 2, 2, dtype=torch.float64)
    assert l2_and_linf(nn.AdaptiveAvgPool2d(4), few)["l2"] > 1.9


@pytest.mark.parametrize("size", [(3, 3), (5, 4), (6, 1)])
def test_adaptive_pools_of_an_example(size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    for pool in (nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((3, 2)), nn.AdaptiveAvgPool2d(7)):
        model = nn.Sequential(nn.Identity(), pool)
        found = l2_and_linf(pool, x[:1])["l2"]
        assert found <= lf.certify(model, example=x).bound * (1 + 1e-12)
        assert lf.certify(model, example=x).bound <= 1.3 * found


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm(affine: bool) -> None:
    module = nn.GroupNorm(2, 4, eps=1e-2, affine=affine).double()
    if affine:
        nn.init.normal_(module.weight)
    gains = [
        l2_and_linf(module, size * torch.randn(1, 4, 3, dtype=torch.float64))["l2"]
        for size in (0.0, 1e-3, 0.1, 1.0)
    ]
    bound = lf.certify(module).bound
    assert max(gains) <= bound * (1 + 1e-12)
    assert max(gains) >= 0.99 * bound
    for norm in ("token", "self", "linf"):
        with pytest.raises(lf.NotCertifiable, match=f"no bound in the {norm} norm"):
            lf.certify(module, norm=norm)
    with pytest.raises(lf.NotCertifiable, match="unbounded"):
        lf.certify(nn.GroupNorm(2, 4, eps=0.0))


def test_refusals() -> None:
    for module in (nn.AvgPool1d(2), nn.MaxPool2d(2), nn.AdaptiveAvgPool1d(1)):
        for norm in ("token", "self"):
            with pytest.raises(lf.NotCertifiable, match=f"no bound in the {norm} norm"):
                lf.certify(module, norm=norm)
    with pytest.raises(lf.NotCertifiable, match="return_indices"):
        lf.certify(nn.MaxPool1d(2, return_indices=True))

    class Loud(nn.MaxPool1d):
        def forward(self, x: Tensor) -> Tensor:
            return 3 * super().forward(x)

    with pytest.raises(lf.NotCertifiable, match="overrides the forward of MaxPool1d"):
        lf.certify(Loud(2))
    attention = lf.L2MultiheadAttention(4, 1, batch_first=True)
    with pytest.raises(lf.NotCertifiable, match="grows with the number of tokens"):
        lf.certify(nn.Sequential(nn.AvgPool1d(2), attention), seq_len=2)


def test_pools_within_samples() -> None:
    """Of (B, L) a pool takes samples for channels, and keeps them apart; of (L,) it does not."""
    model = nn.Sequential(nn.Linear(6, 6), nn.AvgPool1d(2), nn.Linear(3, 2))
    radius = lf.analysis.certified_radius(model, torch.randn(4, 6), torch.zeros(4, dtype=torch.int64))
    assert radius.shape == (4,)
    ask = lf.certificate.Ask("l2", alone=True, dims=2)
    with pytest.raises(lf.NotCertifiable, match="samples may influence"):
        lf.certificate.bounds.bound_of(nn.AvgPool2d(2), ask)
