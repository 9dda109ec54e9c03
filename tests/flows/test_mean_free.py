"""Densities in the mean-free subspace, and the equivariant AttentionFlow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lipformer as lf
from lipformer.flows import AttentionFlow, InvertibleResidual, MeanFreeNormal, MeanFreeScale
from lipformer.flows.log_det.closed_form import has_closed_form
from lipformer.layers import PairRadial, SubtractMean
from tests.layers.battery import scrambled
from tests.oracles import dense_jacobian


def flow_of(dim: int, particles: int, **options: Any) -> AttentionFlow:
    given: dict[str, Any] = {"depth": 1, "num_heads": 3, "hidden": 8, "feed_forwards": 1, "coeff": 0.9}
    flow = AttentionFlow(dim, seq_len=particles, equivariant=True, **{**given, **options}).double()
    flow.initialize(1.5 * torch.randn(64, particles, dim, dtype=torch.float64))
    return scrambled(flow, 0.5).eval()


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("key_radius", [None, 0.7])
def test_the_density_of_two_particles_integrates_to_one(dim: int, key_radius: float | None) -> None:
    """Along a ray of the subspace: the density does not depend on the direction (tested below)."""
    flow = flow_of(dim, 2, key_radius=key_radius)
    step = 2e-3
    radius = step * (torch.arange(8_000, dtype=torch.float64) + 0.5)
    ray = torch.zeros(len(radius), dim, dtype=torch.float64)
    ray[:, 0] = radius
    x = torch.stack([ray, -ray], 1) / math.sqrt(2.0)  # an orthonormal chart of the subspace
    around = 2.0 if dim == 1 else 2.0 * math.pi * radius
    with torch.no_grad(), lf.frozen(flow):
        total = (around * flow.log_prob(x).exp()).sum().item() * step
    assert total == pytest.approx(1.0, abs=1e-5)
    # With the constant of the full space it would not.
    assert abs(total / math.sqrt(2 * math.pi) ** dim - 1.0) > 0.5


def test_symmetries_inverse_and_samples() -> None:
    flow = flow_of(3, 5, depth=2, feed_forwards=2)
    x = 2.0 * torch.randn(4, 5, 3, dtype=torch.float64)
    expected = flow.log_prob(x)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    order = torch.tensor([3, 0, 4, 1, 2])
    for other in (x @ turn, x[:, order], x + 7.0):
        torch.testing.assert_close(flow.log_prob(other), expected)
    stretched = x * torch.tensor([1.3, 1.0, 1.0], dtype=torch.float64)  # no symmetry
    assert (flow.log_prob(stretched) - expected).abs().max() > 1e-3
    noise, log_det = flow.forward_and_log_det(x)
    torch.testing.assert_close(flow.inverse(noise, tol=1e-12), x, rtol=0, atol=1e-10)
    torch.testing.assert_close(noise.mean(1), x.mean(1))
    for k in range(2):
        dense = dense_jacobian(flow, x[k : k + 1]).reshape(15, 15)
        torch.testing.assert_close(torch.linalg.slogdet(dense).logabsdet, log_det[k])
    assert flow.sample(6).mean(1).abs().max() < 1e-6


def test_attention_with_scalar_weights_keeps_its_certificate() -> None:
    flow = flow_of(2, 4)
    block = flow.blocks[1]
    attention = block.branch.module[2]
    blocks = attention.q_proj.weight.unflatten(1, (3, 2)).unflatten(0, (3, 2)).transpose(1, 2)
    torch.testing.assert_close(blocks, blocks[..., :1, :1] * torch.eye(2, dtype=torch.float64))
    bound = lf.certify(block.branch).bound
    assert bound == pytest.approx(0.9)
    x = torch.randn(1, 4, 2, dtype=torch.float64)
    attack = lf.attack_lipschitz(block.branch, x, steps=8, restarts=2)
    assert 0.05 < attack.value <= bound
    assert lf.certify(flow).bound >= lf.estimate_lipschitz(flow, x).value


def test_what_an_equivariant_flow_does_not_take() -> None:
    good: dict[str, Any] = {"depth": 1, "num_heads": 2, "hidden": 8, "seq_len": 4, "equivariant": True}
    refused = [
        {"mode": "causal"},
        {"causal": True},
        {"width": 8},
        {"linear": "plu"},
        {"base": torch.distributions.Normal(0.0, 1.0)},
        {"positions": "rotary"},
        {"seq_len": None},
        {"hidden": [8, 8]},
        {"context_dim": 3},
    ]
    for wrong in refused:
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
            AttentionFlow(2, **{**good, **wrong})


def test_fewer_particles_have_a_map_and_no_density() -> None:
    """The noise is of all particles: its part would not have mean zero."""
    flow = flow_of(2, 4)
    x = torch.randn(2, 4, 2, dtype=torch.float64)
    mask = torch.tensor([[False] * 4, [False] * 3 + [True]])
    y, log_det = flow.forward_and_log_det(x, mask)
    few, few_log_det = flow.forward_and_log_det(x[1:, :3])
    torch.testing.assert_close(y[1:, :3], few)
    torch.testing.assert_close(log_det[1:], few_log_det)
    torch.testing.assert_close(flow(x, mask), y)
    torch.testing.assert_close(flow.inverse(y, mask), x, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"padding.*events \(4, 2\)"):
        flow.log_prob(x, mask)
    with pytest.raises(ValueError, match=r"padding.*events \(4, 2\)"):
        flow.sample(2, key_padding_mask=mask)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("real", [1, 3, 4])
def test_one_scale_about_the_mean(real: int, dtype: torch.dtype) -> None:
    block = MeanFreeScale().to(dtype)
    nn.init.constant_(block.log_scale, 0.4)
    mask = torch.arange(4)[None] >= real
    x = torch.randn(1, 4, 3, dtype=dtype)
    y, log_det = block.eval().forward_and_log_det(x, mask)
    dense = dense_jacobian(lambda x: block(x, mask), x).reshape(12, 12)
    assert log_det.dtype == dtype
    torch.testing.assert_close(torch.linalg.slogdet(dense).logabsdet, log_det[0])
    torch.testing.assert_close(y[:, :real].mean(1), x[:, :real].mean(1))
    assert torch.equal(y[:, real:], x[:, real:])
    back, other = block.inverse_and_log_det(y, mask)
    torch.testing.assert_close(back, x)
    torch.testing.assert_close(other, -log_det)
    found = torch.linalg.matrix_norm(dense.double(), 2).item()
    assert found <= lf.certify(block).bound * (1 + 1e-6)


def test_the_first_batch_gets_deviation_one() -> None:
    block = MeanFreeScale()
    x = 3.0 + 2.5 * torch.randn(500, 5, 2)
    y = block(x)
    centred = y - y.mean(1, keepdim=True)
    assert centred.square().sum().item() / (500 * 8) == pytest.approx(1.0, rel=1e-4)
    assert bool(block.initialized)
    with pytest.raises(ValueError, match="NaN"):
        MeanFreeScale()(torch.full((2, 3, 2), torch.nan))
    with pytest.raises(lf.NotCertifiable, match="first training batch"):
        InvertibleResidual(nn.Sequential(MeanFreeScale(), SubtractMean()))


def test_noise_of_mean_zero() -> None:
    base = MeanFreeNormal(3, 2)
    z = base.sample(torch.Size((20_000,)))
    assert z.mean(1).abs().max() < 1e-6
    assert z.square().sum((1, 2)).mean().item() == pytest.approx(4.0, rel=0.05)
    assert -base.log_prob(z).mean().item() == pytest.approx(
        2.0 * math.log(2 * math.pi * math.e), abs=0.05
    )
    torch.testing.assert_close(base.log_prob(z + 1.0), base.log_prob(z), rtol=1e-4, atol=1e-4)


class OtherPairs(PairRadial):
    """The same map of another class, of which no Jacobian is known."""


def test_exact_log_dets_in_closed_form_are_those_of_backward_passes() -> None:
    x = torch.randn(3, 4, 2, dtype=torch.float64)
    mask = torch.tensor([[False] * 4, [False, True, False, False], [False] * 4])
    found = []
    for kind in (PairRadial, OtherPairs):
        block = InvertibleResidual(kind(6), 0.9, log_det="exact").double()
        assert has_closed_form(block.branch) == (kind is PairRadial)
        slopes = block.branch.module.raw_slopes
        nn.init.constant_(slopes, 0.3).data[::2].neg_()
        point = x.clone().requires_grad_()
        out, value = block.forward_and_log_det(point, mask)
        found.append([out, value, *torch.autograd.grad(value.square().sum(), (point, slopes))])
    for known, expected in zip(*found, strict=True):
        torch.testing.assert_close(known, expected)


def test_it_is_saved_with_its_arguments(tmp_path: Path) -> None:
    flow = flow_of(2, 4, key_radius=0.7).float()
    flow.save_pretrained(tmp_path)
    again = AttentionFlow.from_pretrained(tmp_path).eval()
    x = torch.randn(3, 4, 2)
    assert torch.equal(again.log_prob(x), flow.log_prob(x))
