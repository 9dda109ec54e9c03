"""Continuing a prefix: draws, their densities, and flows that cannot."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, Normal

import lipformer as lf
from lipformer.flows import AttentionFlow, Flow, InvertibleSequential
from lipformer.flows.mean_free import MeanFreeScale
from tests.layers.battery import scrambled

F64 = torch.float64
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"mode": "causal", "depth": 2},
    "past": {"mode": "causal", "past_bias": True},
    "norm": {"causal": True},
    "linear": {"mode": "causal", "linear": "plu", "feed_forwards": 2},
    "rotary": {"mode": "causal", "positions": "rotary", "seq_len": 12},
    "base": {"mode": "causal", "base": Normal(torch.tensor(0.5, dtype=F64), 2.0)},
}


def flow(dim: int = 2, **options: Any) -> AttentionFlow:
    made = AttentionFlow(dim, **{"depth": 1, "num_heads": 2, "width": 8, "hidden": 16, **options})
    scrambled(made)
    context = None if made.context_dim is None else torch.randn(64, made.context_dim)
    made.initialize(torch.randn(64, 4, dim).exp(), context=context)
    return made.double().eval()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", OPTIONS)
def test_new_tokens_are_fresh_noise_given_the_prefix(name: str) -> None:
    made = flow(**OPTIONS[name])
    prefix = torch.randn(3, 5, 2, dtype=F64)
    new = made.continue_(prefix, 4, num_samples=2, generator=seeded(), tol=1e-12)
    assert new.shape == (2, 3, 4, 2)
    noise = made._base_sample((6, 4, 2), seeded()).view(2, 3, 4, 2)
    for k in range(2):
        whole = made(torch.cat([prefix, new[k]], 1))
        torch.testing.assert_close(whole[:, :5], made(prefix), rtol=0, atol=1e-12)
        torch.testing.assert_close(whole[:, 5:], noise[k], rtol=0, atol=1e-9)
    assert all(r.converged for r in made.record if r is not None)
    one = made.continue_(prefix, 4, generator=seeded(1))
    assert one.shape == (3, 4, 2)
    assert torch.equal(one, made.continue_(prefix, 4, generator=seeded(1)))
    assert not torch.equal(one, made.continue_(prefix, 4, generator=seeded(2)))
    assert made.continue_(prefix[:0], 4).shape == (0, 4, 2)


def test_the_prefix_is_evaluated_once_and_new_tokens_together() -> None:
    made = flow(mode="causal", depth=2)
    seen: list[int] = []
    for part in made.modules():
        if isinstance(part, lf.L2MultiheadAttention):
            step = part.step

            def counting(x: Tensor, *rest: Any, step: Any = step, **options: Any) -> Any:
                seen.append(x.shape[1])
                return step(x, *rest, **options)

            part.step = counting  # type: ignore[method-assign]
    made.continue_(torch.randn(1, 7, 2, dtype=F64), 3)
    assert seen.count(7) == 2, "once in each attention"
    assert set(seen) == {7, 3}


def grid_density(made: AttentionFlow, prefix: Tensor, grid: Tensor) -> Tensor:
    """p(x | prefix) of one token of one feature, (G,)."""
    given = prefix.expand(len(grid), -1, -1)
    with torch.no_grad():
        return made.log_prob(grid[:, None, None], prefix=given).exp()


def test_the_conditional_density_integrates_to_one_and_is_that_of_the_draws() -> None:
    made = flow(1, mode="causal", depth=2)
    levels = torch.randn(64, 1, 1, dtype=F64).sign() + 0.2 * torch.randn(64, 4, 1, dtype=F64).exp()
    optimiser = torch.optim.Adam(made.parameters(), 0.03)
    for _ in range(30):
        optimiser.zero_grad()
        (-made.log_prob(levels).mean()).backward()
        optimiser.step()
    prefixes = torch.tensor([[[-0.8], [-0.9], [-0.7]], [[1.2], [1.1], [1.3]]], dtype=F64)
    grid = torch.linspace(-25.0, 40.0, 1301, dtype=F64)
    draws = made.continue_(prefixes, 1, num_samples=1000, generator=seeded())[:, :, 0, 0]
    gaps = torch.zeros(2, 2)
    for i in range(2):
        density = grid_density(made, prefixes[i : i + 1], grid)
        below = torch.cumulative_trapezoid(density, grid)
        assert abs(float(below[-1]) - 1.0) < 1e-4
        for j in range(2):
            found = torch.searchsorted(draws[:, j].sort().values.contiguous(), grid[1:]) / 1000
            gaps[i, j] = (found - below).abs().max()
    assert bool((gaps.diagonal() < 1.95 / 1000**0.5).all()), "Kolmogorov-Smirnov at 1e-3"
    assert float(gaps[0, 1]) > 0.1, "negative control: another prefix has other draws"


def test_conditional_densities_of_two_tokens_integrate_to_one() -> None:
    made = flow(1, mode="causal")
    prefix = torch.tensor([[[0.3], [2.0]]], dtype=F64)
    axis = torch.linspace(-10.0, 20.0, 101, dtype=F64)
    grid = torch.cartesian_prod(axis, axis)[:, :, None]
    with torch.no_grad():
        density = made.log_prob(grid, prefix=prefix.expand(len(grid), -1, -1)).exp().view(101, 101)
    assert abs(float(torch.trapezoid(torch.trapezoid(density, axis), axis)) - 1.0) < 1e-4


def test_the_chain_rule() -> None:
    made = flow(mode="causal")
    x = torch.randn(4, 9, 2, dtype=F64, requires_grad=True)
    whole = made.log_prob(x)
    one_by_one = made.log_prob(x[:, :1])
    for i in range(1, 9):
        one_by_one = one_by_one + made.log_prob(x[:, i : i + 1], prefix=x[:, :i])
    torch.testing.assert_close(one_by_one, whole, rtol=1e-10, atol=1e-10)
    given = made.log_prob(x[:, 6:], prefix=x[:, :6])
    torch.testing.assert_close(given, whole - made.log_prob(x[:, :6]))
    assert torch.autograd.grad(given.sum(), x)[0].abs().sum() > 0


def test_a_context_goes_along() -> None:
    made = flow(mode="causal", context_dim=3)
    prefix, context = torch.randn(2, 4, 2, dtype=F64), torch.randn(2, 3, dtype=F64)
    new = made.continue_(prefix, 3, context, num_samples=2, generator=seeded(), tol=1e-12)
    noise = torch.randn(4, 3, 2, generator=seeded(), dtype=F64)
    whole = made(torch.cat([prefix.repeat(2, 1, 1), new.flatten(0, 1)], 1), context=context.repeat(2, 1))
    torch.testing.assert_close(whole[:, 4:], noise, rtol=0, atol=1e-9)
    given = made.log_prob(new[0], prefix=prefix, context=context)
    both = made.log_prob(torch.cat([prefix, new[0]], 1), context=context)
    torch.testing.assert_close(given, both - made.log_prob(prefix, context=context))


def test_stacks_in_stacks_and_steps_of_them() -> None:
    attention = lf.L2MultiheadAttention(4, 2, batch_first=True, causal=True, positions="alibi")
    block = lf.InvertibleResidual(attention, mode="causal")
    inner = InvertibleSequential(lf.ActNorm(4), block)
    made = Flow([inner, lf.InvertibleResidual(lf.FeedForward(4, 8))]).double().eval()
    x = torch.randn(2, 6, 4, dtype=F64)
    with torch.no_grad():
        noise = made(x)
        first, cache = made.blocks.step(x[:, :4])
        second, _ = made.blocks.step(x[:, 4:], cache)
        torch.testing.assert_close(torch.cat([first, second], 1), noise)
        back, cache = made.blocks.inverse_step(noise[:, :4], tol=1e-12)
        rest, _ = made.blocks.inverse_step(noise[:, 4:], cache, tol=1e-12)
    torch.testing.assert_close(torch.cat([back, rest], 1), x, rtol=0, atol=1e-10)
    new = made.continue_(x, 2, generator=seeded())
    drawn = torch.randn(2, 2, 4, generator=seeded(), dtype=F64)
    torch.testing.assert_close(made(torch.cat([x, new], 1))[:, 6:], drawn, rtol=0, atol=1e-4)


def test_what_cannot_be_continued_says_why() -> None:
    x = torch.randn(2, 3, 2, dtype=F64)
    for act in (lambda f: f.continue_(x, 2), lambda f: f.log_prob(x, prefix=x)):
        with pytest.raises(ValueError, match="only a causal flow .* depend on later ones, by a Inv"):
            act(flow(seq_len=12))
        events = Independent(Normal(torch.zeros(9, 2, dtype=F64), 1.0), 2)
        with pytest.raises(ValueError, match=r"one of events \(9, 2\)"):
            act(flow(mode="causal", base=events))
        with pytest.raises(ValueError, match="seq_len=4, got 3 tokens and"):
            act(flow(mode="causal", seq_len=4))
        with pytest.raises(ValueError, match="depend on later ones, by a MeanFreeScale"):
            act(Flow([InvertibleSequential(MeanFreeScale())], dim=2).double())
    made = flow(mode="causal")
    with pytest.raises(ValueError, match=r"at least one token, got \(2, 0, 2\)"):
        made.continue_(x[:, :0], 2)
    with pytest.raises(ValueError, match="at least 1, got steps=0, num_samples=None"):
        made.continue_(x, 0)
    with pytest.raises(ValueError, match="prefix or a key_padding_mask"):
        made.log_prob(x, torch.zeros(2, 3, dtype=torch.bool), prefix=x)
    with pytest.raises(ValueError, match=r"tensors \(B, T, 2\), got \(2, 3, 1\)"):
        made.continue_(x[..., :1], 2)
    with pytest.raises(TypeError, match=r"whole numbers, got \(2, 2.0, 2\)"):
        made.continue_(x, 2.0)  # type: ignore[arg-type]
    draws = made.continue_(x, 2, num_samples=3)
    for given, prefix in ((draws, x), (draws[0], x[:1]), (draws[0], x[..., :1])):
        sizes = (str(tuple(t.shape)) for t in (given, prefix))
        with pytest.raises(ValueError, match=re.escape("got x {} and prefix {}".format(*sizes))):
            made.log_prob(given, prefix=prefix)
    densities = made.log_prob(draws.flatten(0, 1), prefix=x.repeat(3, 1, 1))  # as the message says
    torch.testing.assert_close(densities[2:4], made.log_prob(draws[1], prefix=x))
