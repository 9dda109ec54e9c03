"""AttentionFlow: densities of sets and sequences, padding, bases, sampling."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Laplace, MultivariateNormal, Normal

import lipformer as lf
from lipformer.flows import ActNorm, AttentionFlow, InvertibleLinear, InvertibleResidual, Permutation
from tests.layers.battery import saved
from tests.oracles import dense_jacobian

SET = {"depth": 2, "num_heads": 2, "hidden": (8, 6), "width": 8, "seq_len": 6}
SEQUENCE = {**SET, "mode": "causal", "linear": "plu"}
WIDE = {"depth": 1, "num_heads": 2, "hidden": 8, "mode": "causal", "linear": "permutation"}
KINDS = {
    "set": (2, SET),
    "sequence": (2, SEQUENCE),
    "sequence, norm": (2, {**SET, "causal": True, "positions": "rotary"}),
    "no width, alibi": (4, WIDE),
    "past": (2, {**SEQUENCE, "past_bias": True}),
}


def made(kind: str, **options: Any) -> AttentionFlow:
    """A flow in float64 that has seen a first batch and is no longer special."""
    dim, arguments = KINDS[kind]
    torch.manual_seed(0)
    flow = AttentionFlow(dim, **{**arguments, **options}).double()
    flow(1.0 + 2.0 * torch.randn(16, 6, dim, dtype=torch.float64))
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return flow.eval()


def events(kind: str, batch: int = 3, tokens: int = 6) -> Tensor:
    return torch.randn(batch, tokens, KINDS[kind][0], dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_log_prob_is_the_change_of_variables(kind: str) -> None:
    flow, x = made(kind), events(kind)
    method = None if flow.causal else "exact"
    got = flow.log_prob(x, method=method)
    assert got.shape == (3,)
    for b in range(3):
        noise = flow(x[b : b + 1])
        log_det = torch.linalg.slogdet(dense_jacobian(flow, x[b : b + 1]))[1]
        expected = Normal(0.0, 1.0).log_prob(noise).sum() + log_det
        torch.testing.assert_close(got[b], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_inverse_inverts(kind: str) -> None:
    flow, x = made(kind), events(kind)
    method = None if flow.causal else "exact"
    noise, log_det = flow.forward_and_log_det(x, method=method)
    torch.testing.assert_close(noise, flow(x), rtol=1e-12, atol=1e-12)
    back, back_log_det = flow.inverse_and_log_det(noise, method=method, tol=1e-13)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-9)
    torch.testing.assert_close(back_log_det, -log_det, rtol=0, atol=1e-8)
    torch.testing.assert_close(flow.inverse(noise, tol=1e-13), back, rtol=0, atol=1e-10)


def test_a_flow_on_sets_does_not_see_the_order() -> None:
    flow, x = made("set"), events("set")
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(flow(x)[:, order], flow(x[:, order]), rtol=0, atol=1e-12)
    before, after = flow.log_prob(x, method="exact"), flow.log_prob(x[:, order], method="exact")
    torch.testing.assert_close(before, after, rtol=0, atol=1e-10)
    sequence = made("sequence")
    change = sequence.log_prob(x) - sequence.log_prob(x[:, order])
    assert change.abs().max() > 1e-3, "a causal flow does: the test can fail"


def test_a_flow_on_sets_sees_the_other_points() -> None:
    flow, x = made("set"), events("set")
    moved = x.clone()
    moved[:, 1:] += 1.0
    assert (flow(moved)[:, 0] - flow(x)[:, 0]).abs().max() > 1e-3


def test_a_flow_on_sequences_is_causal() -> None:
    flow, x = made("sequence"), events("sequence")
    later = x.clone()
    later[:, 4:] += 1.0
    torch.testing.assert_close(flow(later)[:, :4], flow(x)[:, :4], rtol=0, atol=1e-12)
    # So densities of beginnings are densities too: p(x) = p(x_<4) p(rest | x_<4).
    start = flow.log_prob(x[:, :4]) - flow.log_prob(later[:, :4])
    assert torch.equal(start, torch.zeros(3).double())


@pytest.mark.parametrize("kind", KINDS)
def test_padding_counts_for_nothing(kind: str) -> None:
    flow, x = made(kind), events(kind)
    method = None if flow.causal else "exact"
    padded = torch.zeros(3, 6, dtype=torch.bool)
    padded[1, 4:] = True
    spoilt = x.masked_fill(padded.unsqueeze(-1), 50.0)
    noise, log_det = flow.forward_and_log_det(spoilt, padded, method=method)
    assert torch.equal(noise[1, 4:], spoilt[1, 4:])
    short_noise, short_log_det = flow.forward_and_log_det(x[1:2, :4], method=method)
    torch.testing.assert_close(noise[1, :4], short_noise[0], rtol=0, atol=1e-11)
    torch.testing.assert_close(log_det[1], short_log_det[0], rtol=0, atol=1e-10)
    log_prob = flow.log_prob(spoilt, padded, method=method)
    torch.testing.assert_close(
        log_prob[1], flow.log_prob(x[1:2, :4], method=method)[0], rtol=0, atol=1e-9
    )
    torch.testing.assert_close(log_prob[0], flow.log_prob(x[:1], method=method)[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(flow.inverse(noise, padded, tol=1e-13), spoilt, rtol=0, atol=1e-8)
    assert (flow.log_prob(spoilt, method=method)[1] - log_prob[1]).abs() > 1.0


@pytest.mark.parametrize("kind", ["set", "sequence"])
def test_densities_integrate_to_one(kind: str) -> None:
    """On a grid, for sets of one point: the numbers are densities, not scores."""
    flow = made(kind)
    line = torch.linspace(-12.0, 14.0, 261, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line).unsqueeze(1)
    with torch.no_grad():
        total = flow.log_prob(grid, method="exact").exp().sum() * (line[1] - line[0]) ** 2
    assert total.item() == pytest.approx(1.0, abs=2e-3)


def test_estimates_agree_with_the_exact_density_in_the_mean() -> None:
    flow, x = made("set").train(), events("set", batch=1)
    exact = flow.log_prob(x, method="exact").item()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        draws = flow.log_prob(x.expand(2000, -1, -1), generator=generator)
    assert abs(draws.mean().item() - exact) <= 4.0 * draws.std().item() / math.sqrt(2000)
    assert draws.std() > 0.0, "the default of a flow on sets is an estimate"


def test_a_generator_decides_estimates_and_samples() -> None:
    flow, x = made("set").train(), events("set")

    def draws(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [flow.log_prob(x, generator=generator), flow.sample(2, generator=generator)]

    first, again, other = draws(1), draws(1), draws(2)
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_samples_follow_the_density() -> None:
    """The entropy -E log p(x) of samples equals that of the noise minus E log|det|."""
    flow = made("sequence")
    generator = torch.Generator().manual_seed(0)
    x = flow.sample(200, 5, generator=generator, tol=1e-10)
    assert x.shape == (200, 5, 2)
    noise = torch.randn(200, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(flow(x), noise, rtol=0, atol=1e-7)


BASES = {
    "numbers": Laplace(0.0, 1.0),
    "tokens": MultivariateNormal(torch.zeros(2).double(), 2.0 * torch.eye(2).double()),
    "events": Independent(Normal(torch.zeros(6, 2).double(), 3.0), 2),
}


@pytest.mark.parametrize("name", BASES)
def test_any_distribution_can_be_the_base(name: str) -> None:
    base = BASES[name]
    flow = made("sequence", base=base)
    x = flow.sample(3, 6, generator=torch.Generator().manual_seed(5))
    assert torch.equal(x, flow.sample(3, 6, generator=torch.Generator().manual_seed(5)))
    assert not torch.equal(x, flow.sample(3, 6))
    noise, log_det = flow.forward_and_log_det(x)
    expected = base.log_prob(noise).reshape(3, -1).sum(-1) + log_det
    torch.testing.assert_close(flow.log_prob(x), expected, rtol=0, atol=1e-10)
    padded = torch.zeros(3, 6, dtype=torch.bool)
    padded[:, 5] = True
    if name == "events":
        with pytest.raises(ValueError, match="with padding the base must be a distribution of numbers"):
            flow.log_prob(x, padded)
    else:
        torch.testing.assert_close(flow.log_prob(x, padded), flow.log_prob(x[:, :5]))


def test_a_draw_for_the_base_leaves_the_global_generator_alone() -> None:
    flow = made("sequence", base=BASES["numbers"])
    state = torch.get_rng_state()
    flow.sample(1, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), state)


def test_training_lowers_the_loss_and_keeps_the_inverse() -> None:
    torch.manual_seed(0)
    flow = AttentionFlow(2, depth=1, num_heads=2, hidden=16, width=8, seq_len=5, mode="causal")
    x = 0.3 * torch.randn(256, 5, 2) + torch.randn(256, 1, 2)
    optimiser = torch.optim.Adam(flow.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        loss = -flow.log_prob(x).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    for block in flow.blocks:
        if isinstance(block, ActNorm):
            assert block.initialized
    with torch.no_grad():
        assert (flow.inverse(flow(x)) - x).abs().max() <= 1e-4
    # Saved and loaded it is the same density, and its first batch stays the first.
    other = AttentionFlow(2, depth=1, num_heads=2, hidden=16, width=8, seq_len=5, mode="causal")
    other.load_state_dict(saved(flow))
    expected = flow.log_prob(x)
    assert torch.equal(other.log_prob(x), expected)
    assert torch.equal(copy.deepcopy(flow).log_prob(x), expected)


def test_gradients_are_those_of_the_density() -> None:
    flow, x = made("sequence"), events("sequence", batch=2, tokens=4)
    weight = flow.get_parameter("blocks.2.branch.module.0.parametrizations.weight.original")
    (grad,) = torch.autograd.grad(flow.log_prob(x).sum(), weight)
    direction, step, found = torch.randn_like(weight), 1e-5, []
    with torch.no_grad():
        for move in (step, -2 * step):
            weight.add_(move * direction)
            found.append(flow.log_prob(x).sum())
    slope = (found[0] - found[1]) / (2 * step)
    torch.testing.assert_close((grad * direction).sum(), slope, rtol=1e-6, atol=1e-7)


def test_the_flow_has_a_certificate() -> None:
    flow = made("set")
    bound = lf.certify(flow).bound
    parts = [lf.certify(block).bound for block in flow.blocks]
    assert 0.7 * math.prod(parts) < bound <= math.prod(parts), "paths gain a little here"
    jacobian = dense_jacobian(flow, events("set", batch=1))
    assert torch.linalg.matrix_norm(jacobian, 2).item() <= bound


@pytest.mark.parametrize("kind", ["set", "sequence"])
def test_baked_it_is_the_same_density(kind: str) -> None:
    flow, x = made(kind), events(kind)
    baked = lf.bake(flow)
    method = "exact"
    torch.testing.assert_close(
        baked.log_prob(x, method=method), flow.log_prob(x, method=method), rtol=0, atol=1e-8
    )
    torch.testing.assert_close(baked.inverse(flow(x), tol=1e-12), x, rtol=0, atol=1e-8)


def test_what_it_is_built_of() -> None:
    flow = AttentionFlow(4, depth=2, num_heads=2, hidden=8, feed_forwards=2, seq_len=3, linear="plu")
    block = [ActNorm, InvertibleLinear, *[InvertibleResidual] * 3]
    assert [type(part) for part in flow.blocks] == [*block, *block, ActNorm]
    methods = [part.log_det_method for part in flow.blocks if isinstance(part, InvertibleResidual)]
    assert methods == ["auto", "causal", "causal"] * 2
    other = AttentionFlow(4, depth=1, num_heads=2, mode="causal", linear="permutation")
    assert isinstance(other.blocks[1], Permutation)
    assert isinstance(other.blocks[2], InvertibleResidual)


def test_samples_of_several_lengths() -> None:
    flow = AttentionFlow(2, depth=1, num_heads=1, seq_len=5).eval()
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    long = flow.sample(2, generator=torch.Generator().manual_seed(1), key_padding_mask=mask)
    assert not long[1, 3:].any()
    assert long[1, :3].all()
    assert bool(torch.isfinite(flow.log_prob(long, mask, method="exact")).all())


def test_initialize_is_the_first_batch_in_training() -> None:
    x = 3.0 + 2.0 * torch.randn(64, 4, 2)
    flow = AttentionFlow(2, depth=1, num_heads=1, seq_len=4)
    other = copy.deepcopy(flow)
    flow.eval().initialize(x)
    other.train()(x)
    torch.testing.assert_close(flow.state_dict(), other.state_dict())
    flow.initialize(x * 5)
    torch.testing.assert_close(flow.state_dict(), other.state_dict())


@pytest.mark.parametrize("base", [None, Normal(0.0, 1.0)])
def test_what_stands_in_padding_reaches_no_gradient(
    base: Distribution | None,
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: AttentionFlow(2, **{**SET, "coeff": 1.0}), "coeff"),
        (lambda: AttentionFlow(2, num_heads=4, seq_len=3), "dim=2 features, which num_heads=4"),
        (lambda: AttentionFlow(2, num_heads=2, width=4, past_bias=True), "needs mode='causal'.*'norm'"),
        (lambda: AttentionFlow(2, num_heads=2, mode="causal", past_bias=True), "and a width, got.*None"),
        (lambda: made("set").float()(torch.zeros(1, 9, 2)), "seq_len=6, got 9 tokens"),
        (lambda: made("set").float().log_prob(events("set")), "float32, got torch.float64"),
        (lambda: made("no width, alibi").sample(3), "sample needs seq_len"),
    ],
)
def test_what_a_flow_refuses(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
