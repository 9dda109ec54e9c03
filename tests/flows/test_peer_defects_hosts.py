"""Defects of other libraries' invertible blocks, each shown in theirs and absent from ours.

The list is that of the project's notes on flow libraries. What is shown of a peer documents why the
test beside it exists; if a new version of the peer mends it, the test here says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.flows import InvertibleResidual, NotConverged, to_freia, to_normflows
from tests.oracles import dense_jacobian

with warnings.catch_warnings():
    # FrEIA's docstrings have invalid escapes, which Python warns of when it first compiles them.
    warnings.simplefilter("ignore")
    import FrEIA.modules
    import normflows as nf

T, D = 6, 8


def block(mode: str = "norm", coeff: float = 0.9, **options: Any) -> InvertibleResidual:
    attention = lf.L2MultiheadAttention(
        D, 2, batch_first=True, value_proj=False, causal=mode == "causal"
    )
    return InvertibleResidual(attention, coeff, mode, seq_len=T, **options)


def steep(coeff: float = 0.97) -> nn.Linear:
    """A linear branch of gain coeff with all signs in its spectrum: the slowest to invert."""
    linear = nn.Linear(D, D, bias=False)
    with torch.no_grad():
        rotation = nn.init.orthogonal_(torch.empty(D, D))
        linear.weight.copy_(coeff * rotation)
    return linear


# normflows Residual: the tolerance is compared with squared steps.


def test_normflows_stops_far_from_the_inverse() -> None:
    net = steep()
    peer = nf.flows.Residual(net, reverse=False).eval().iresblock
    x = torch.randn(4, D)
    with torch.no_grad():
        found = peer._inverse_fixed_point(x + net(x))
    assert (found - x).abs().max() > 1e-3, "asked for 1e-5"


@pytest.mark.parametrize("tol", [1e-3, 1e-5])
def test_our_tolerance_is_that_of_the_error(tol: float) -> None:
    net = steep()
    ours = InvertibleResidual(net, 0.97)
    x = torch.randn(4, T, D)
    with torch.no_grad():
        y = ours(x)
        through_host, _ = to_normflows(ours, tol=tol)(y)
    # The promise is in the norm over the whole event, so for each entry too.
    assert (through_host - x).abs().max() <= tol * max(1.0, y.abs().max().item())
    assert ours.record is not None
    assert bool((ours.record.error_bound >= (through_host - x).flatten(1).norm(dim=1) - 2e-6).all())


# normflows Residual: stops silently after 1000 iterations.


def test_normflows_does_not_say_that_it_failed() -> None:
    net = steep(1.0)  # an expansion by nothing: no contraction, no convergence
    peer = nf.flows.Residual(net, reverse=False).eval().iresblock
    x = torch.randn(4, D)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = peer._inverse_fixed_point(x + net(x))
    assert (found - x).abs().max() > 0.1


def test_ours_raises_and_says_how_far_it_got() -> None:
    # A rotation: neither iteration nor acceleration gets far in three evaluations.
    ours = InvertibleResidual(steep(), 0.97)
    y = torch.randn(4, T, D)
    for run in (ours.inverse, to_normflows(ours, max_iter=3)):
        with pytest.raises(NotConverged) as caught:
            run(y, max_iter=3) if run == ours.inverse else run(y)
        record = caught.value.record
        assert not record.converged
        assert record.residual.shape == (4,)
        assert int(record.evaluations.max()) <= 3


# normflows: the contraction is lost unless update_lipschitz is called after each step.


def trained(module: nn.Module, run: Callable[[Tensor], Tensor]) -> None:
    optimiser = torch.optim.Adam(module.parameters(), lr=0.1)
    for _ in range(20):
        optimiser.zero_grad()
        (-run(torch.randn(16, T, D)).square().mean()).backward()
        optimiser.step()


def spectral_gain(branch: Callable[[Tensor], Tensor], x: Tensor) -> float:
    return torch.linalg.matrix_norm(dense_jacobian(branch, x), 2).item()


def test_normflows_expands_after_training_without_update() -> None:
    # Three layers of 8 units as its documentation builds them, with coefficient 0.9.
    net = nf.nets.LipschitzMLP([D, 8, D], init_zeros=False, lipschitz_const=0.9)
    nf.utils.update_lipschitz(net, 50)
    trained(net, net)
    assert spectral_gain(net, torch.randn(1, D)) > 1.0


@pytest.mark.parametrize("mode", ["norm", "causal"])
def test_ours_contracts_after_training_with_no_call(mode: str) -> None:
    ours = block(mode)
    trained(ours, lambda x: ours.branch(x))
    for scale in (0.1, 1.0, 10.0):
        x = scale * torch.randn(1, T, D)
        jacobian = dense_jacobian(ours.branch, x)
        if mode == "norm":
            assert lf.certify(ours.branch, norm=ours.norm_in_use()).bound <= 0.9
        else:
            own = torch.stack([jacobian[i : i + D, i : i + D] for i in range(0, T * D, D)])
            assert torch.linalg.matrix_norm(own, 2).max() <= 0.9 * (1 + 1e-5)
        with torch.no_grad():
            y = ours(x)
            back = ours.inverse(y)
            assert (ours(back) - y).abs().max() <= 1e-5 * max(1.0, y.abs().max().item())


# normflows: the memory-saving gradient scales every sample by the weight of the first one.


def gradients(run: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (run(x) * weights).sum().backward()
    assert x.grad is not None
    return x.grad


def test_normflows_gives_all_samples_the_first_ones_weight() -> None:
    net = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    for parameter in net.parameters():
        parameter.requires_grad_()
        nn.init.normal_(parameter, std=0.15)
    peer = nf.flows.Residual(net, reverse=False, n_power_series=8).train()
    x = torch.randn(2, D)
    torch.manual_seed(1)
    both = gradients(lambda x: peer.iresblock._logdetgrad(x)[1].squeeze(1), x, torch.tensor([0.0, 1.0]))
    assert both[1].abs().max() == 0.0, "the weight 1 of the second sample is lost"


@pytest.mark.parametrize("method", ["series", "roulette"])
def test_our_gradients_keep_each_samples_weight(method: str) -> None:
    ours = block(log_det=method).double()
    x = torch.randn(2, T, D, dtype=torch.float64)
    flow = to_normflows(ours)

    def weighted(*weights: float) -> Tensor:
        torch.manual_seed(1)
        return gradients(lambda x: flow.inverse(x)[1], x, torch.tensor(weights).double())

    first, second = weighted(1.0, 0.0), weighted(0.0, 1.0)
    assert first[1].abs().max() == 0.0
    assert second[0].abs().max() == 0.0
    assert second[1].abs().max() > 0.0
    torch.testing.assert_close(weighted(3.0, -2.0), 3.0 * first - 2.0 * second, rtol=1e-9, atol=1e-12)


# normflows: NumPy's generator decides the number of terms.


def test_numpy_decides_in_normflows_and_torch_in_ours() -> None:
    net = steep(0.5)
    peer = nf.flows.Residual(net, reverse=False).train()
    ours = block(log_det="roulette")
    x, events = torch.randn(4, D), torch.randn(4, T, D)

    def draws(run: Callable[[], Tensor], seed: int) -> set[float]:
        values = set()
        for numpy_seed in range(8):
            np.random.seed(numpy_seed)
            torch.manual_seed(seed)
            values.add(run().sum().item())
        return values

    assert len(draws(lambda: peer.inverse(x)[1], 0)) > 1
    flow = to_normflows(ours)
    assert len(draws(lambda: flow.inverse(events)[1], 0)) == 1
    generator = torch.Generator()
    seeded = to_normflows(ours, generator=generator)
    values = set()
    for _ in range(3):
        generator.manual_seed(5)
        values.add(seeded.inverse(events)[1].sum().item())
    assert len(values) == 1
    generator.manual_seed(6)
    assert seeded.inverse(events)[1].sum().item() not in values


# FrEIA IResNetLayer: its log-determinant carries no gradient.


def test_freias_log_det_has_no_gradient_and_ours_has() -> None:
    peer = FrEIA.modules.IResNetLayer([(D,)])
    _, log_det = peer([torch.randn(3, D)])
    assert not log_det.requires_grad
    ours = block()
    for method in ("exact", "series", "roulette"):
        _, log_det = to_freia(ours, [(T, D)], method=method)((torch.randn(3, T, D),))
        grads = torch.autograd.grad(log_det.sum(), list(ours.parameters()), allow_unused=True)
        assert any(g is not None and bool((g != 0).any()) for g in grads), method


# FrEIA IResNetLayer: with rev=True the log-determinant is taken at the wrong point.


class Slope(nn.Module):
    """0.8 tanh: its slope differs between a point and the block's output there."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.8 * x.tanh()


def test_freias_log_det_in_reverse_is_taken_at_the_latent() -> None:
    peer = FrEIA.modules.IResNetLayer([(1,)], jacobian_iterations=60)
    peer.residual = Slope()
    x = torch.tensor([[1.0]])
    (z,), forward = peer([x.clone()])
    _, reverse = peer([z.detach().clone()], rev=True)
    truth = (1.0 + 0.8 * (1.0 - x.tanh().square())).log().squeeze()
    assert abs(forward[0] - truth) < 1e-3
    assert abs(reverse[0] + truth) > 0.1


@pytest.mark.parametrize("mode", ["norm", "causal"])
def test_our_log_det_in_reverse_is_taken_at_the_data(mode: str) -> None:
    ours = block(mode).double()
    adapted = to_freia(ours, [(T, D)], method="exact", tol=1e-13)
    x = 2.0 * torch.randn(3, T, D, dtype=torch.float64)
    (z,), forward = adapted((x,))
    (back,), reverse = adapted((z,), rev=True)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-10)
    torch.testing.assert_close(reverse, -forward, rtol=0, atol=1e-9)
    for b in range(3):
        truth = torch.linalg.slogdet(dense_jacobian(ours, x[b : b + 1]))[1]
        torch.testing.assert_close(reverse[b], -truth, rtol=0, atol=1e-9)


# torchflows: the sign of the log-determinant in the inverse, a biased roulette, an unused coefficient.


@pytest.mark.parametrize("method", ["exact", "series", "roulette"])
def test_the_inverse_has_the_other_sign(method: str) -> None:
    ours = block()
    generator = torch.Generator()
    x = torch.randn(3, T, D)
    y, forward = ours.forward_and_log_det(x, method=method, generator=generator.manual_seed(0))
    _, inverse = ours.inverse_and_log_det(y, method=method, generator=generator.manual_seed(0))
    torch.testing.assert_close(inverse, -forward, rtol=1e-3, atol=1e-4)
    assert forward.abs().min() > 1e-3, "of zero the sign would not show"


def test_the_coefficient_decides_the_contraction() -> None:
    gains = []
    for coeff in (0.3, 0.9):
        torch.manual_seed(0)
        ours = InvertibleResidual(steep(5.0), coeff)
        gains.append(spectral_gain(ours.branch, torch.zeros(1, 1, D)))
    assert gains[0] == pytest.approx(0.3, rel=1e-3)
    assert gains[1] == pytest.approx(0.9, rel=1e-3)


# InvertibleAttention (Zha et al.): error 2e-7 at input scale 1, 2.7 at 3, NaN at 10.


class DotProductResidual(nn.Module):
    """x + a dot-product attention, inverted by iteration in the hope that it contracts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 1, batch_first=True, bias=False)

    def branch(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]

    def inverse(self, y: Tensor) -> Tensor:
        x = y
        for _ in range(200):
            x = y - self.branch(x)
        return x


@pytest.mark.parametrize("mode", ["norm", "causal"])
def test_the_error_does_not_grow_with_the_input(mode: str) -> None:
    ours = block(mode)
    for scale in (1.0, 3.0, 10.0, 1000.0):
        x = scale * torch.randn(4, T, D)
        with torch.no_grad():
            error = (ours.inverse(ours(x)) - x).abs().max().item()
        assert error <= 1e-5 * scale, scale


def test_that_of_dot_product_attention_does() -> None:
    theirs = DotProductResidual()
    with torch.no_grad():
        theirs.attention.in_proj_weight.mul_(1.5)
        errors = []
        for scale in (0.1, 10.0):
            x = scale * torch.randn(4, T, D)
            errors.append((theirs.inverse(x + theirs.branch(x)) - x).abs().max().item() / scale)
    assert errors[0] < 1e-4
    assert not errors[1] < 1e-2, "large or not a number"
