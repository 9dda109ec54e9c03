"""What a reviewer broke once in invertible blocks and flows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.certificate import Ask, Bound
from lipformer.flows import ActNorm, AttentionFlow, InvertibleLinear, NotConverged, to_torch_transform


class Exploding(nn.Module):
    """Each token adds the exponential of the one before: overflows within a few tokens."""

    causal = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        return self.weight * (before.abs().exp() - x)


@lf.register_bound(Exploding)
def _(module: Exploding, ask: Ask) -> Bound:
    return Bound(module.weight.abs(), "own token")


def test_an_overflow_does_not_pass_for_convergence() -> None:
    block = lf.InvertibleResidual(Exploding(), 0.9, "causal")
    with pytest.raises(NotConverged):
        block.inverse(3.0 * torch.randn(2, 6, 3, dtype=torch.float64), max_iter=50)


def test_act_norm_in_a_branch_must_be_set_first() -> None:
    norm = ActNorm(4)
    with pytest.raises(lf.NotCertifiable, match="first training batch"):
        lf.InvertibleResidual(nn.Sequential(norm, lf.SpectralLinear(4, 4)), 0.5)
    x = 1e-3 * torch.randn(8, 5, 4)
    norm.initialize(x)
    block = lf.InvertibleResidual(nn.Sequential(norm, lf.SpectralLinear(4, 4)), 0.5)
    first, second = (block.forward_and_log_det(x, method="exact")[1] for _ in range(2))
    assert torch.equal(first, second)
    assert bool((first.abs() <= 20 * 0.7).all())


@pytest.mark.parametrize("base", [None, torch.distributions.Normal(0.0, 1.0)])
def test_what_stands_in_padding_reaches_no_gradient(
    base: torch.distributions.Distribution | None,
) -> None:
    flow = AttentionFlow(
        4, depth=1, num_heads=2, hidden=8, seq_len=4, linear="plu", log_det="exact", base=base
    )
    x = torch.randn(3, 4, 4)
    padded = torch.zeros(3, 4, dtype=torch.bool)
    padded[0, 2:] = True
    flow.initialize(x, padded)
    x[padded] = torch.nan
    flow.log_prob(x, padded).sum().backward()
    for name, weight in flow.named_parameters():
        assert weight.grad is None or bool(weight.grad.isfinite().all()), name


def test_a_pair_of_other_weights_is_not_used() -> None:
    flow = AttentionFlow(4, depth=1, num_heads=2, hidden=8, seq_len=3, log_det="exact").eval()
    transform = to_torch_transform(flow)
    y = torch.randn(2, 3, 4)
    with torch.no_grad():
        x = transform.inv(y)
    assert transform.log_abs_det_jacobian(x, y).requires_grad
    x = transform.inv(y)
    with torch.no_grad():
        for weight in flow.parameters():
            weight.add_(0.3)
    now = -flow.forward_and_log_det(y)[1]
    torch.testing.assert_close(transform.log_abs_det_jacobian(x, y), now)


def test_max_min_of_the_largest_numbers() -> None:
    x = torch.tensor([[3e38, -3e38], [-3e38, 3e38]])
    assert torch.equal(lf.MaxMin()(x), torch.tensor([[3e38, -3e38], [3e38, -3e38]]))


@pytest.mark.parametrize("method", ["exact", "causal", "series", "roulette"])
def test_log_determinants_of_no_samples(method: str) -> None:
    attention = lf.L2MultiheadAttention(4, 2, batch_first=True, causal=True, value_proj=True)
    block = lf.InvertibleResidual(attention, 0.9, seq_len=8)
    assert block.log_det(torch.zeros(0, 3, 4), method=method).value.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_maps_in_half_precision_have_an_inverse(dtype: torch.dtype) -> None:
    layer, x = InvertibleLinear(4).to(dtype), torch.randn(2, 3, 4, dtype=dtype)
    torch.testing.assert_close(layer.inverse(layer(x)), x, rtol=0, atol=0.1)


def test_autocast_does_not_round_a_density() -> None:
    layer, x = InvertibleLinear(4), torch.randn(2, 3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = layer(x)
    assert torch.equal(rounded, layer(x))


def test_branches_that_overwrite_their_input_are_refused() -> None:
    with pytest.raises(ValueError, match="inplace=False"):
        lf.InvertibleResidual(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), 0.3)
