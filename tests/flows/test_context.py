"""Flows with a context: a density for every context, with its inverse and its derivatives."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import lipformer as lf
from lipformer.flows import (
    ActNorm,
    AttentionFlow,
    ContextAffine,
    ContextEncoder,
    Flow,
    InvertibleResidual,
    InvertibleSequential,
    estimate_inverse_gain,
)
from lipformer.flows.solve.norms import MEASURES
from lipformer.layers import ContextBias
from tests.layers.battery import CertifiedLayer, saved, scrambled, slow_compile
from tests.oracles import dense_jacobian

BASIC = {"depth": 1, "num_heads": 2, "hidden": (8, 6), "width": 8, "context_dim": 3}
KINDS: dict[str, dict[str, Any]] = {
    "set": {**BASIC, "seq_len": 4},
    "sequence": {**BASIC, "mode": "causal", "linear": "plu"},
}


def made(kind: str, dim: int = 2, **options: Any) -> AttentionFlow:
    """A flow in float64 that has seen a first batch, with weights far from those it starts with."""
    torch.manual_seed(0)
    flow = AttentionFlow(dim, **{**KINDS[kind], **options}).double()
    batch = torch.randn(16, 4, dim, dtype=torch.float64)
    flow.initialize(batch, context=torch.randn(16, 3, dtype=torch.float64))
    return scrambled(flow, 0.2).eval()  # type: ignore[return-value]


def events(batch: int = 3, tokens: int = 4, dim: int = 2) -> Tensor:
    return torch.randn(batch, tokens, dim, dtype=torch.float64)


def contexts(*shape: int, size: float = 1.0) -> Tensor:
    return size * torch.randn(*shape, dtype=torch.float64)


class TestContextAffine(CertifiedLayer):
    least = 0.05

    def make(self) -> nn.Module:
        return ContextAffine(8, 3)

    test_compile = slow_compile

    def call(self, module: nn.Module, x: Tensor, variant: str = "plain") -> Tensor:
        return module(x, context=torch.linspace(-1.0, 1.0, 3 * len(x), dtype=x.dtype).view(-1, 3))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_no_context_is_steeper_than_the_bound(self, dtype: torch.dtype) -> None:
        module = scrambled(ContextAffine(4, 3)).to(dtype)
        c = (100.0 * torch.randn(64, 3)).to(dtype)
        steepness = module._maps(torch.zeros(64, 1, 4, dtype=dtype), None, c)[2].exp().double().max()
        bound = lf.certify(module).bound
        assert steepness <= bound <= math.exp(2.0) * (1.0 + 20.0 * torch.finfo(dtype).eps)
        assert steepness > 0.99 * math.exp(2.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [False, True])
def test_log_prob_is_the_change_of_variables(kind: str, tokens: bool) -> None:
    flow, x = made(kind), events()
    c = contexts(3, 5, 3) if tokens else contexts(3, 3)
    got = flow.log_prob(x, context=c)
    for b in range(3):
        one = slice(b, b + 1)
        jacobian = dense_jacobian(lambda x, one=one: flow(x, context=c[one]), x[one])
        noise = flow(x[one], context=c[one])
        expected = Normal(0.0, 1.0).log_prob(noise).sum() + torch.linalg.slogdet(jacobian)[1]
        torch.testing.assert_close(got[b], expected, rtol=1e-9, atol=1e-9)
    assert (got - flow.log_prob(x, context=c + 1.0)).abs().min() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["one token of two", "two tokens of one"])
def test_densities_integrate_to_one_for_every_context(kind: str, form: str) -> None:
    dim = 2 if form == "one token of two" else 1
    flow = made(kind, dim=dim, seq_len=4, linear=None)
    line = torch.linspace(-12.0, 12.0, 61, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line).view(-1, 2 // dim, dim)
    densities = []
    for c in (contexts(3), contexts(3, size=3.0), contexts(1, 5, 3)):
        with torch.no_grad():
            densities.append(flow.log_prob(grid, context=c).exp())
        total = densities[-1].sum() * (line[1] - line[0]) ** 2
        assert total.item() == pytest.approx(1.0, abs=1e-4)
    assert (densities[0] - densities[1]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_inverse_inverts_each_event_with_its_own_context(kind: str) -> None:
    """The samples leave the solve one by one, and their contexts with them."""
    flow, x = made(kind), torch.logspace(-2, 1, 6)[:, None, None] * events(6)
    c = torch.logspace(1, -2, 6)[:, None] * contexts(6, 3)
    padded = torch.zeros(6, 4, dtype=torch.bool)
    padded[2, 2:] = True
    noise, log_det = flow.forward_and_log_det(x, padded, c)
    back, back_log_det = flow.inverse_and_log_det(noise, padded, c, tol=1e-13)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-8)
    torch.testing.assert_close(back_log_det, -log_det, rtol=0, atol=1e-7)
    assert torch.equal(noise[2, 2:], x[2, 2:])
    short = flow.forward_and_log_det(x[2:3, :2], None, c[2:3])
    torch.testing.assert_close(noise[2:3, :2], short[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(log_det[2:3], short[1], rtol=0, atol=1e-10)
    blocks = [block for block in flow.blocks if isinstance(block, InvertibleResidual)]
    assert all(block.record.converged for block in blocks)
    assert len(set(blocks[0].record.evaluations.tolist())) > 1, "all would leave at once"


@pytest.mark.parametrize("kind", KINDS)
def test_no_context_breaks_the_constant_in_x(kind: str) -> None:
    flow = made(kind)
    code = flow._given(events(1), None, contexts(1, 3, size=100.0))[2].detach()
    for block in flow.blocks:
        if isinstance(block, InvertibleResidual) and block.mode == "norm":
            norm = block.norm_in_use()
            fn = functools.partial(block.branch, context=code)
            found = lf.attack_lipschitz(fn, events(1), norm=norm, steps=2, restarts=1)
            assert found.value <= lf.certify(block.branch, norm=norm).bound * (1 + 1e-9) < 1.0
    jacobian = dense_jacobian(lambda x: flow(x, context=contexts(3)), events(1))
    assert torch.linalg.matrix_norm(jacobian, 2).item() <= lf.certify(flow, seq_len=4).bound


def conditional_block(mode: str = "norm", **options: Any) -> InvertibleResidual:
    attention = lf.L2MultiheadAttention(
        4, 2, batch_first=True, causal=mode == "causal", positions="alibi" if mode == "causal" else None
    )
    branch = nn.Sequential(
        lf.SpectralLinear(1, 4), ContextBias(4, 2), lf.LipSwish(), attention, lf.SpectralLinear(4, 1)
    )
    block = InvertibleResidual(branch, 0.8, mode, seq_len=3, **options)
    return scrambled(block, 0.5).double()  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("mode", "method", "training"),
    [("norm", "exact", True), ("norm", "exact", False), ("causal", "causal", True)],
)
def test_gradients_reach_the_context_through_log_determinants(
    mode: str, method: str, training: bool
) -> None:
    block, x, c = conditional_block(mode).train(training), events(2, 3, 1), contexts(2, 2)
    weight = block.branch.module[1].linear.weight

    def value(c: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        named = {"0.branch.module.1.linear.weight": w}
        return torch.func.functional_call(_LogDet(block, method), named, (x, c))

    inputs = tuple(t.detach().clone().requires_grad_() for t in (c, x, weight))
    assert torch.autograd.gradcheck(value, inputs, fast_mode=True)
    if method == "exact":
        assert torch.autograd.gradgradcheck(lambda c: value(c, x, weight)[1], inputs[:1], fast_mode=True)


class _LogDet(nn.Sequential):
    """forward_and_log_det of one block as a module."""

    def __init__(self, block: InvertibleResidual, method: str) -> None:
        super().__init__(block)
        self.method = method

    def forward(self, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return self[0].forward_and_log_det(x, context=c, method=self.method)


def test_estimates_and_their_gradients_are_those_of_the_context() -> None:
    """Events of one number, for which a probe of the series is exact; roulette in the mean."""
    block, x = conditional_block(terms=80).train(), events(1, 1, 1).expand(3000, -1, -1)
    c = contexts(1, 2).requires_grad_()

    def found(method: str, batch: int) -> tuple[Tensor, Tensor]:
        given = c.expand(batch, -1).clone()
        generator = torch.Generator().manual_seed(0)
        value = block.log_det(x[:batch], context=given, method=method, generator=generator).value
        return value.detach(), torch.autograd.grad(value.sum(), given)[0]

    exact, gradient = found("exact", 1)
    assert gradient.abs().max() > 1e-3
    series = found("series", 1)
    torch.testing.assert_close(series[0], exact, rtol=0, atol=1e-7)
    torch.testing.assert_close(series[1], gradient, rtol=1e-5, atol=1e-7)
    block.terms = None
    value, slopes = found("roulette", 3000)
    for draws, mean in ((value[:, None], exact[0]), (slopes, gradient[0])):
        error = 5.0 * draws.std(0) / math.sqrt(3000) + 1e-9
        assert bool(((draws.mean(0) - mean).abs() <= error).all())


@pytest.mark.parametrize("mode", ["norm", "causal"])
def test_gradients_reach_the_context_through_the_inverse(mode: str) -> None:
    block = conditional_block(mode).eval()
    y, c = events(2, 3, 1).requires_grad_(), contexts(2, 2).requires_grad_()
    fn = functools.partial(block.inverse, tol=1e-13)
    assert torch.autograd.gradcheck(lambda y, c: fn(y, context=c), (y, c), fast_mode=True)
    for weight in block.parameters():
        weight.requires_grad_(False)
    assert block.inverse(y.detach(), context=c).requires_grad, "the context alone is enough"


def test_the_promise_of_an_inverse_counts_the_context_s_rounding() -> None:
    """Large contexts that cancel: in float32 their sum is off by far more than what is done with x."""
    block = feed_forward_block().float().eval()
    c = torch.tensor([[3e5, -3e5], [1e4, 1.0], [1.0, 1.0]])
    with torch.no_grad():
        weight = block.branch.module[1].linear.weight
        weight[:, 1] = weight[:, 0] * (1.0 + 1e-6 * torch.arange(6.0))
    y = events(3, 3, 1).float()
    x = block.inverse(y, context=c)
    # The same effective weights, in float64.
    exact = lf.bake(block).double().inverse(y.double(), context=c.double(), tol=1e-13)
    error = MEASURES[block.norm_in_use()](x.double() - exact)
    assert bool((error <= block.record.error_bound).all())
    assert error[0] > 100.0 * block.record.error_bound[2], "the test can tell"


@pytest.mark.parametrize("mode", ["norm", "causal"])
def test_steps_take_the_context(mode: str) -> None:
    block = conditional_block("causal").eval() if mode == "causal" else feed_forward_block().eval()
    x, c = events(3, 3, 1), contexts(3, 2)
    y, found, back, cache, inverse_cache = block(x, context=c), [], [], None, None
    for i in range(3):
        out, cache = block.step(x[:, i : i + 1], cache, context=c)
        again, inverse_cache = block.inverse_step(out, inverse_cache, context=c, tol=1e-12)
        found.append(out)
        back.append(again)
    torch.testing.assert_close(torch.cat(found, 1), y, rtol=0, atol=1e-11)
    torch.testing.assert_close(torch.cat(back, 1), x, rtol=0, atol=1e-9)


def feed_forward_block(dim: int = 1, context_dim: int = 2) -> InvertibleResidual:
    branch = nn.Sequential(
        lf.SpectralLinear(dim, 6), ContextBias(6, context_dim), lf.LipSwish(), lf.SpectralLinear(6, dim)
    )
    return InvertibleResidual(branch, 0.8, log_det="causal").double()


def test_a_stack_gives_the_context_to_the_blocks_that_take_it() -> None:
    plain = InvertibleResidual(lf.FeedForward(2, 4), 0.5)
    inner = InvertibleSequential(ContextAffine(2, 2), feed_forward_block(2))
    stack = scrambled(InvertibleSequential(ActNorm(2), plain, inner).double().eval())
    assert stack.context_dim == 2
    assert plain.context_dim is None
    x, c = events(), contexts(3, 2)
    y, log_det = stack.forward_and_log_det(x, context=c)
    torch.testing.assert_close(stack(x, context=c), y)
    torch.testing.assert_close(stack.inverse(y, context=c, tol=1e-12), x, rtol=0, atol=1e-9)
    for b in range(3):
        jacobian = dense_jacobian(lambda x, b=b: stack(x, context=c[b : b + 1]), x[b : b + 1])
        torch.testing.assert_close(log_det[b], torch.linalg.slogdet(jacobian)[1])
    # As a flow without an encoder it takes vectors alone.
    flow = Flow(stack, dim=2, seq_len=4)
    assert flow.context_dim == 2
    assert flow.sample(5, context=c[0]).shape == (5, 4, 2)
    with pytest.raises(ValueError, match=r"\(2,\), \(B, 2\), with B = 1 or that of the events \(3, 4"):
        flow.log_prob(x, context=contexts(3, 5, 2))
    blocks = [feed_forward_block(2), plain.double()]
    assert bool((estimate_inverse_gain(blocks, x, context=c, steps=3) <= 25.0).all())


FORMS = [((3,), 1), ((5, 3), 5), ((1, 7, 3), 1)]


@pytest.mark.parametrize(("shape", "many"), FORMS)
def test_samples_have_one_context_or_one_each(shape: tuple[int, ...], many: int) -> None:
    flow, c = made("set"), contexts(*shape)
    drawn = [flow.sample(5, context=c, generator=torch.Generator().manual_seed(4)) for _ in range(2)]
    assert torch.equal(*drawn)
    each = c.expand(5, *shape[1:]) if len(shape) > 1 else c.expand(5, 3)
    noise = torch.randn(5, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(drawn[0], flow.inverse(noise, context=each), rtol=0, atol=1e-12)
    torch.testing.assert_close(flow(drawn[0], context=c), noise, rtol=0, atol=1e-4)
    assert (flow(drawn[0], context=each.flip(0))[0] - noise[0]).abs().max() > 1e-3 or many == 1


def test_the_encoder_pools_tokens() -> None:
    encoder = scrambled(ContextEncoder(3, 5), 1.0).double()
    c = contexts(2, 6, 3)
    pooled = encoder(c)
    torch.testing.assert_close(encoder(c[:, torch.randperm(6)]), pooled)
    features = nn.functional.silu(encoder.features(c))
    weights = torch.softmax(encoder.scores(features), 1)
    torch.testing.assert_close(pooled, (weights * encoder.values(features)).sum(1))
    # Padded tokens count for nothing, whatever stands there.
    padded = torch.zeros(2, 6, dtype=torch.bool)
    padded[0, 2:], padded[1] = True, True
    spoilt = c.masked_fill(padded[..., None], torch.nan).requires_grad_()
    short = encoder(spoilt, padded)
    torch.testing.assert_close(short[:1], encoder(c[:1, :2]))
    assert not short[1].any()
    short.square().sum().backward()
    assert all(bool(t.grad.isfinite().all()) for t in (spoilt, *encoder.parameters()))


def test_context_tokens_may_be_padded() -> None:
    flow, x, c = made("set"), events(), contexts(3, 5, 3)
    padded = torch.zeros(3, 5, dtype=torch.bool)
    padded[1, 2:] = True
    got = flow.log_prob(x, context=(c, padded))
    torch.testing.assert_close(got[1:2], flow.log_prob(x[1:2], context=c[1:2, :2]))
    torch.testing.assert_close(got[0], flow.log_prob(x, context=c)[0])
    assert flow.sample(3, context=(c, padded)).shape == (3, 4, 2)
    vectors = contexts(3, 3)
    one = flow.log_prob(x, context=vectors.unsqueeze(1))
    torch.testing.assert_close(one, flow.log_prob(x, context=vectors))


def test_a_flow_learns_what_the_context_says() -> None:
    """Two contexts, two modes."""
    torch.manual_seed(0)
    c = torch.randint(0, 2, (128, 1)).float() * 2.0 - 1.0
    x = 2.0 * c[:, None] + 0.3 * torch.randn(128, 1, 2)
    flow = AttentionFlow(2, depth=1, num_heads=1, width=4, hidden=8, seq_len=1, context_dim=1)
    optimiser = torch.optim.Adam(flow.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        loss = -flow.log_prob(x, context=c, method="exact").mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    entropy = 2.0 * (0.5 * math.log(2.0 * math.pi * math.e) + math.log(0.3))
    assert losses[-1] < entropy + 0.3 < losses[0] - 1.0
    flow.eval()
    for side in (-1.0, 1.0):
        mean = flow.sample(64, context=torch.tensor([side])).mean((0, 1))
        assert (mean - 2.0 * side).abs().max() < 0.5
    wrong = flow.log_prob(x, context=-c).mean()
    assert wrong < flow.log_prob(x, context=c).mean() - 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_the_same_density(kind: str) -> None:
    flow, x, c = made(kind), events(), contexts(3, 3)
    expected = flow.log_prob(x, context=c)
    other = AttentionFlow(2, **KINDS[kind]).double().eval()
    other.load_state_dict(saved(flow))
    for copied in (copy.deepcopy(flow), other):
        assert torch.equal(copied.log_prob(x, context=c), expected)
    baked = lf.bake(flow)
    torch.testing.assert_close(baked.log_prob(x, context=c), expected, rtol=0, atol=1e-8)
    noise = flow(x, context=c)
    torch.testing.assert_close(baked.inverse(noise, context=c, tol=1e-12), x, rtol=0, atol=1e-8)
    with lf.frozen(flow):
        assert torch.equal(flow.log_prob(x, context=c), expected)
        given = c.clone().requires_grad_()
        assert torch.autograd.grad(flow.inverse(noise, context=given).sum(), given)[0].any()
    with torch.inference_mode():
        assert torch.equal(flow.log_prob(x.clone(), context=c.clone()), expected)
        flow.sample(3, 4, context=c.clone())
    x, c = x.float(), c.float()
    expected = flow.float().log_prob(x, context=c)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(flow.log_prob(x, context=c), expected, rtol=0, atol=1e-3)
        assert flow.sample(3, 4, context=c).shape == (3, 4, 2)


@pytest.mark.slow
# Dynamo looks at .grad of what goes from one graph to the next, which is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_log_prob_compiles() -> None:
    flow, x, c = made("sequence"), events(), contexts(3, 3).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, c: flow.log_prob(x, context=c), backend="eager")
    got, expected = compiled(x, c), flow.log_prob(x, context=c)
    torch.testing.assert_close(got, expected)
    gradients = [torch.autograd.grad(value.sum(), c)[0] for value in (got, expected)]
    torch.testing.assert_close(*gradients)


X = torch.zeros(2, 4, 2)


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (None, r"takes a context \(3,\).*got None: give it by name"),
        (torch.zeros(2, 4), r"\(B, 3\).*of the events \(2, 4, 2\), got \(2, 4\)"),
        (torch.zeros(5, 3), r"of the events \(2, 4, 2\), got \(5, 3\)"),
        (torch.zeros(2, 1, 4, 3), r"got \(2, 1, 4, 3\)"),
        ((torch.zeros(2, 3), torch.zeros(2, 3).bool()), r"mask \(B, S\).*got \(2, 3\)"),
        ((torch.zeros(2, 5, 3), torch.zeros(2, 4).bool()), r"key_padding_mask"),
        (torch.zeros(2, 3).double(), "must be torch.float32 as the events are, got torch.float64"),
    ],
)
def test_what_a_flow_with_context_refuses(context: Any, message: str) -> None:
    flow = AttentionFlow(2, **KINDS["set"]).eval()
    for call in (flow, flow.inverse, flow.forward_and_log_det, flow.inverse_and_log_det, flow.log_prob):
        with pytest.raises(ValueError, match=message):
            call(X, context=context)
    with pytest.raises(ValueError, match=message):
        flow.sample(2, context=context)
    with pytest.raises(ValueError, match=message):
        flow.initialize(X, context=context)


def test_what_takes_no_context_says_so() -> None:
    block = InvertibleResidual(lf.FeedForward(2, 4))
    stack, c = InvertibleSequential(ActNorm(2), block).eval(), torch.zeros(2, 3)
    flow = AttentionFlow(2, depth=1, num_heads=1, seq_len=4).eval()
    for module in (block, stack, flow):
        for name in ("forward", "inverse", "forward_and_log_det", "inverse_and_log_det"):
            with pytest.raises(ValueError, match=r"takes no context.*got (context )?\(2, 3\)"):
                getattr(module, name)(X, context=c)
    for call in (lambda: flow.log_prob(X, context=c), lambda: flow.sample(2, context=c)):
        with pytest.raises(ValueError, match="build it with context_dim=C"):
            call()
    conditional = InvertibleSequential(ContextAffine(2, 3))
    for wrong in (None, torch.zeros(1, 3), torch.zeros(2, 4), torch.zeros(2, 1, 3)):
        with pytest.raises(ValueError, match=r"InvertibleSequential takes a context \(B, 3\)"):
            conditional(X, context=wrong)
    with pytest.raises(ValueError, match="limit must be positive"):
        ContextAffine(2, 3, limit=0.0)


def test_saving_keeps_the_context(tmp_path: Path) -> None:
    flow = AttentionFlow(2, **KINDS["sequence"]).eval()
    flow.save_pretrained(tmp_path)
    x, c = events().float(), contexts(3, 3).float()
    loaded = AttentionFlow.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded.log_prob(x, context=c), flow.log_prob(x, context=c))
