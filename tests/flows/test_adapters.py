"""Through each of six hosts a block has the log_prob that it has here, and samples that fit it."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, TransformedDistribution

import lipformer as lf
from lipformer.flows import (
    ActNorm,
    AttentionFlow,
    InvertibleResidual,
    NotConverged,
    adapters,
    to_freia,
    to_nflows,
    to_normflows,
    to_pyro,
    to_torch_transform,
    to_zuko,
)

with warnings.catch_warnings():
    # Its docstrings have invalid escapes, which Python warns of when it first compiles them.
    warnings.simplefilter("ignore")
    import FrEIA.framework
    import FrEIA.modules

T, D = 5, 4


def block(mode: str = "causal") -> InvertibleResidual:
    causal = mode == "causal"
    attention = lf.L2MultiheadAttention(D, 2, batch_first=True, value_proj=False, causal=causal)
    return InvertibleResidual(attention, 0.9, mode, seq_len=T)


def reference(module: Any, x: Tensor, **options: Any) -> Tensor:
    """Our own log_prob with a standard normal base."""
    noise, log_det = module.forward_and_log_det(x, **options)
    return Normal(0.0, 1.0).log_prob(noise).sum((1, 2)) + log_det


def normal(event: tuple[int, ...] = (T, D)) -> Independent:
    return Independent(Normal(torch.zeros(event), torch.ones(event)), len(event))


class Host:
    """A density in one of the libraries: log_prob of (B, *event) and samples; a base of the host's."""

    def __init__(self, module: nn.Module, event: tuple[int, ...] = (T, D), **options: Any) -> None:
        raise NotImplementedError

    def log_prob(self, x: Tensor) -> Tensor:
        return self.density.log_prob(x)

    def sample(self, n: int) -> Tensor:
        return self.density.sample((n,))


class Torch(Host):
    def __init__(self, module: nn.Module, event: tuple[int, ...] = (T, D), **options: Any) -> None:
        self.adapted = to_torch_transform(module, **options)
        self.density = TransformedDistribution(normal(event), [self.adapted])


class Pyro(Host):
    def __init__(self, module: nn.Module, event: tuple[int, ...] = (T, D), **options: Any) -> None:
        import pyro.distributions as dist

        self.adapted = to_pyro(module, **options)
        base = dist.Normal(torch.zeros(event), torch.ones(event)).to_event(len(event))
        self.density = dist.TransformedDistribution(base, [self.adapted])


class Zuko(Host):
    def __init__(self, module: nn.Module, event: tuple[int, ...] = (T, D), **options: Any) -> None:
        import zuko

        self.adapted = to_zuko(module, **options)
        base = zuko.lazy.UnconditionalDistribution(
            zuko.distributions.DiagNormal,
            torch.zeros(event),
            torch.ones(event),
            ndims=len(event),
            buffer=True,
        )
        self.network = zuko.lazy.Flow(self.adapted, base)
        self.density = self.network()


class Normflows(Host):
    def __init__(self, module: nn.Module, event: tuple[int, ...] = (T, D), **options: Any) -> None:
        import normflows as nf

        self.adapted = to_normflows(module, **options)
        base = nf.distributions.DiagGaussian(event, trainable=False)
        self.network = self.density = nf.NormalizingFlow(base, [self.adapted])

    def sample(self, n: int) -> Tensor:
        return self.density.sample(n)[0]


class Nflows(Host):
    def __init__(self, module: nn.Module, event: tuple[int, ...] = (T, D), **options: Any) -> None:
        from nflows.distributions.normal import StandardNormal
        from nflows.flows.base import Flow

        self.adapted = to_nflows(module, **options)
        self.network = self.density = Flow(self.adapted, StandardNormal(event))

    def sample(self, n: int) -> Tensor:
        return self.density.sample(n)


class Freia(Host):
    def __init__(self, module: nn.Module, event: tuple[int, ...] = (T, D), **options: Any) -> None:
        self.event = event
        self.network = FrEIA.framework.SequenceINN(*event)
        self.network.append(lambda dims_in: to_freia(module, dims_in, **options))
        self.adapted = self.network[0]

    def log_prob(self, x: Tensor) -> Tensor:
        noise, log_det = self.network(x)
        return normal(self.event).log_prob(noise) + log_det

    def sample(self, n: int) -> Tensor:
        return self.network(torch.randn(n, *self.event), rev=True)[0]


HOSTS = {host.__name__: host for host in (Torch, Normflows, Nflows, Freia, Zuko, Pyro)}
MODULES: dict[str, Callable[[], Any]] = {
    "causal block": block,
    "norm block, exact": lambda: block("norm"),
    "ActNorm": lambda: ActNorm(D).eval(),
    "AttentionFlow": lambda: AttentionFlow(D, depth=1, num_heads=2, hidden=8, mode="causal").eval(),
}
ADAPTERS = [to_torch_transform, to_normflows, to_nflows, to_freia, to_zuko, to_pyro]


def options_of(name: str) -> dict[str, Any]:
    return {"method": "exact"} if "exact" in name else {}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", MODULES)
def test_log_prob_agrees_and_samples_round_trip(host: str, name: str) -> None:
    module, options = MODULES[name](), options_of(name)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    density = HOSTS[host](module, **options)
    x = torch.randn(6, T, D)
    got = density.log_prob(x)
    assert got.shape == (6,)
    torch.testing.assert_close(got, reference(module, x, **options), rtol=0, atol=1e-5)
    with torch.no_grad():
        torch.manual_seed(3)
        samples = density.sample(7)
        torch.manual_seed(3)
        noise = torch.randn(7, T, D)
    assert samples.shape == (7, T, D)
    torch.testing.assert_close(module(samples), noise, rtol=0, atol=1e-4)
    expected = reference(module, samples, **options)
    torch.testing.assert_close(density.log_prob(samples), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("host", HOSTS)
def test_the_loss_of_a_host_trains_the_block(host: str) -> None:
    module = block()
    (-HOSTS[host](module).log_prob(torch.randn(4, T, D)).mean()).backward()
    got = [p.grad for p in module.parameters() if p.grad is not None]
    assert got
    assert all(bool(torch.isfinite(g).all()) and bool((g != 0).any()) for g in got)


@pytest.mark.parametrize("adapt", [to_torch_transform, to_pyro, to_zuko])
def test_any_leading_shape(adapt: Callable[..., Any]) -> None:
    module = block()
    transform = adapt(module)
    if adapt is to_zuko:
        transform = transform().inv
    noise = torch.randn(2, 3, T, D)
    data = transform(noise)
    assert data.shape == noise.shape
    log_det = transform.log_abs_det_jacobian(noise, data)
    expected = module.forward_and_log_det(data.reshape(6, T, D))[1]
    torch.testing.assert_close(log_det, -expected.reshape(2, 3))
    one = transform(noise[0, 0])
    torch.testing.assert_close(one, data[0, 0], rtol=0, atol=1e-5)
    assert transform.log_abs_det_jacobian(noise[0, 0], one).shape == ()


class Counted(ActNorm):
    """Counts how often it runs."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.forwards = self.inverses = 0

    def token_map(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return super().token_map(x)

    def token_inverse(self, y: Tensor) -> Tensor:
        self.inverses += 1
        return super().token_inverse(y)


@pytest.mark.parametrize("host", ["Torch", "Pyro", "Zuko"])
def test_log_prob_runs_the_block_once(host: str) -> None:
    module = Counted(D).eval()
    density = HOSTS[host](module)
    density.log_prob(torch.randn(3, T, D))
    assert (module.forwards, module.inverses) == (1, 0)
    density.sample(3)
    assert (module.forwards, module.inverses) == (1, 1)


def test_the_kept_pair_is_never_out_of_date() -> None:
    module = ActNorm(D).eval()
    density = Torch(module)
    x = torch.randn(3, T, D)
    before = density.log_prob(x)
    with torch.no_grad():
        module.log_scale.fill_(1.0)
    after = density.log_prob(x)
    torch.testing.assert_close(after, reference(module, x))
    assert (after - before).abs().max() > 1.0
    # Other tensors of the same values are other tensors.
    transform = to_torch_transform(module)
    noise = transform.inv(x)
    torch.testing.assert_close(transform.log_abs_det_jacobian(noise, 2 * x), -torch.full((3,), 20.0))


def test_torch_transform_interface() -> None:
    transform = to_torch_transform(block())
    assert transform.bijective
    assert transform.domain.event_dim == transform.codomain.event_dim == 2
    assert transform.forward_shape(torch.Size([7, T, D])) == (7, T, D)
    cached = transform.with_cache(1)
    noise = torch.randn(2, T, D)
    data = cached(noise)
    assert cached.inv(data) is noise
    assert transform.with_cache(0) is transform
    composed = torch.distributions.ComposeTransform([transform, to_torch_transform(ActNorm(D).eval())])
    y = composed(noise)
    torch.testing.assert_close(composed.inv(y), noise, rtol=0, atol=1e-5)


def test_samples_are_differentiable() -> None:
    module = ActNorm(D).eval()
    density = TransformedDistribution(normal(), [to_torch_transform(module)])
    density.rsample((2,)).sum().backward()
    assert module.shift.grad is not None
    assert module.shift.grad.tolist() == [-10.0] * D


def test_freia_gets_zeros_when_it_asks_for_no_jacobian() -> None:
    module = to_freia(block(), [(T, D)])
    x = torch.randn(3, T, D)
    for rev in (False, True):
        (out,), log_det = module((x,), rev=rev, jac=False)
        (expected,), with_log_det = module((x,), rev=rev)
        torch.testing.assert_close(out, expected)
        assert torch.equal(log_det, torch.zeros(3))
        assert with_log_det.abs().max() > 0
    (noise,), forward = module((x,))
    (back,), reverse = module((noise,), rev=True)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-4)
    torch.testing.assert_close(reverse, -forward, rtol=0, atol=1e-4)  # both are taken at the data
    assert module.output_dims([(T, D)]) == [(T, D)]
    with pytest.raises(ValueError, match=r"shape \(T <= 5, D\), got \(4,\): vectors='token'"):
        to_freia(block(), [(D,)])


def test_in_a_freia_graph() -> None:
    framework = FrEIA.framework
    module = block()
    start = framework.InputNode(T, D, name="x")
    node = framework.Node(start, adapters.hosts.FreiaBlock, {"block": module}, name="attention")
    network = framework.GraphINN([start, node, framework.OutputNode(node, name="z")])
    x = torch.randn(2, T, D)
    noise, log_det = network(x)
    torch.testing.assert_close(noise, module(x))
    torch.testing.assert_close(log_det, module.forward_and_log_det(x)[1])


@pytest.mark.parametrize("adapt", ADAPTERS)
def test_adapters_copy_and_pickle(adapt: Callable[..., Any]) -> None:
    adapted = adapt(block())
    x = torch.randn(2, T, D)
    if adapt in (to_torch_transform, to_pyro):
        adapted.inv(x)  # a pair with a graph is kept
    file = io.BytesIO()
    pickle.dump(adapted, file)
    file.seek(0)
    for twin in (copy.deepcopy(adapted), pickle.load(file)):
        assert twin.block is not adapted.block
        torch.testing.assert_close(twin.block(x), adapted.block(x))


def rotated(coeff: float) -> InvertibleResidual:
    """The slowest to invert: neither iteration nor acceleration gets far in three evaluations."""
    branch = nn.Linear(D, D, bias=False)
    nn.init.orthogonal_(branch.weight)
    return InvertibleResidual(branch, coeff)


@pytest.mark.parametrize("host", HOSTS)
def test_options_reach_the_block(host: str) -> None:
    slow = rotated(0.97)
    with pytest.raises(NotConverged) as caught:
        HOSTS[host](slow, max_iter=3).sample(2)
    assert int(caught.value.record.evaluations.max()) <= 3
    spent = []
    for tol in (1e-3, 1e-5):
        torch.manual_seed(0)
        samples = HOSTS[host](slow, tol=tol).sample(4)
        spent.append(slow.record.iterations)
        torch.manual_seed(0)
        noise = torch.randn(4, T, D)
        exact = torch.linalg.solve(torch.eye(D) + slow.branch(torch.eye(D)[None])[0].T, noise.mT).mT
        # The promise is in the norm over the whole event, so for each entry too.
        assert (samples - exact).abs().max() <= tol * max(1.0, noise.abs().max().item())
    assert spent[0] < spent[1]
    estimated, x, draws = block("norm"), torch.randn(2, T, D), []
    for seed in (5, 5, 6):
        generator = torch.Generator().manual_seed(seed)
        density = HOSTS[host](estimated, method="roulette", generator=generator)
        draws.append(density.log_prob(x))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize(
    ("adapt", "package"),
    [
        (to_normflows, "normflows"),
        (to_nflows, "nflows"),
        (to_freia, "FrEIA"),
        (to_zuko, "zuko"),
        (to_pyro, "pyro-ppl"),
    ],
)
def test_a_missing_library_is_named(
    adapt: Callable[..., Any], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters.hosts._class.cache_clear()
    name = "pyro" if package == "pyro-ppl" else package
    for module in [key for key in sys.modules if key.split(".")[0] == name]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"needs {package}.*pip install 'lipformer\[flows\]'"):
        adapt(block())
    monkeypatch.undo()
    adapters.hosts._class.cache_clear()
    adapt(block())


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


@pytest.mark.parametrize("adapt", [to_torch_transform, to_pyro])
def test_a_cached_pair_is_of_the_present_weights(adapt: Callable[..., Any]) -> None:
    """Also when all norms stay: a sign is turned, two weights are exchanged."""
    module = ActNorm(D).eval()
    with torch.no_grad():
        module.shift.copy_(torch.arange(1.0, D + 1.0))
    cached = adapt(module).with_cache(1)
    x = torch.randn(2, T, D)
    for change in (lambda: module.shift.neg_(), lambda: module.shift.copy_(module.shift.flip(0))):
        for key in ("noise", "data"):
            before = cached(x) if key == "noise" else cached.inv(x)
            assert (cached(x) if key == "noise" else cached.inv(x)) is before
            with torch.no_grad():
                change()
            after = cached(x) if key == "noise" else cached.inv(x)
            torch.testing.assert_close(after, module.inverse(x) if key == "noise" else module(x))
            assert (after - before).abs().max() > 0.5
    y = cached(x)
    with torch.no_grad():
        x += 1.0
    torch.testing.assert_close(cached(x), y + 1.0)
    # A log-determinant of other weights of the same norms.
    flow = block("norm")
    for transform in (adapt(flow, method="exact"), adapt(flow, method="exact").with_cache(1)):
        noise = transform.inv(x)
        with torch.no_grad():
            flow.branch.module.out_proj.weight[0].neg_()
        expected = -flow.forward_and_log_det(x, method="exact")[1]
        torch.testing.assert_close(transform.log_abs_det_jacobian(noise, x), expected)


def test_a_cache_saves_the_solve_and_the_log_determinant() -> None:
    module = Counted(D).eval()
    cached = to_torch_transform(module).with_cache(1)
    density = TransformedDistribution(normal(), [cached])
    y = cached(torch.randn(3, T, D))
    cached.inv(y)
    assert (module.forwards, module.inverses) == (0, 1)
    x = torch.randn(3, T, D)
    density.log_prob(x)
    density.log_prob(x)
    assert module.forwards == 1


def ambiguous(n: int) -> tuple[Tensor, str]:
    shapes = rf"got \({n}, {D}\): give \(1, {n}, {D}\) .* {n} vectors .* vectors='token'"
    return torch.randn(n, D), shapes


@pytest.mark.parametrize("host", HOSTS)
def test_samples_without_tokens_are_not_read_as_one_event(host: str) -> None:
    """Issue 12: 64 samples (B, D) got the log-determinant of one event of 64 tokens."""
    module = InvertibleResidual(lf.FeedForward(D, 8), 0.9)
    x, shapes = ambiguous(64)
    # Torch compares with the base's events itself, unless zuko was imported.
    with pytest.raises(ValueError, match=rf"{shapes}|\[64, {D}\].*\[{T}, {D}\]"):
        HOSTS[host](module).log_prob(x)


@pytest.mark.parametrize("adapt", [to_normflows, to_nflows])
def test_hosts_of_batches_take_no_single_event(adapt: Callable[..., Any]) -> None:
    x, shapes = ambiguous(T)
    for call in (adapt(block()), adapt(block()).inverse):
        with pytest.raises(ValueError, match=shapes):
            call(x)
    with pytest.raises(ValueError, match=shapes):
        to_freia(block(), [(T, D)])((x,), jac=False)


@pytest.mark.parametrize("host", ["Torch", "Pyro", "Zuko"])
def test_a_base_of_events_may_draw_one(host: str) -> None:
    """Its draw has the shape of an event; so has its density where the block says how many tokens."""
    for module in (block(), ActNorm(D).eval()):
        density = HOSTS[host](module).density
        one = density.sample()
        assert one.shape == (T, D)
        if isinstance(module, ActNorm):
            with pytest.raises(ValueError, match=r"give \(1, 5, 4\)"):
                density.log_prob(one)
        else:
            torch.testing.assert_close(density.log_prob(one), density.log_prob(one[None])[0])


def test_what_is_refused() -> None:
    x = torch.randn(2, T, D)
    conditioned: list[Callable[[], object]] = [
        lambda: to_nflows(block())(x, context=x),
        lambda: to_zuko(block())(x),
        lambda: to_freia(block(), [(T, D)])((x,), c=[x]),
    ]
    for call in conditioned:
        with pytest.raises(ValueError, match="takes no condition"):
            call()
    with pytest.raises(TypeError, match="forward_and_log_det.*got Linear"):
        to_torch_transform(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"events have shape \(\*, T <= 5, D\), got \(4,\)"):
        to_torch_transform(block())._call(torch.zeros(4))


def test_pyro_can_register_it() -> None:
    import pyro

    module = to_pyro(block())
    assert module in {module}  # pyro hashes it
    pyro.clear_param_store()
    pyro.module("flow", module)
    assert len(pyro.get_param_store()) == len(list(block().parameters()))
    pyro.clear_param_store()
