"""Every host with its natural shapes: events (B, T, D) and vectors (B, D), sizes, dtypes, modes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal, TransformedDistribution

import lipformer as lf
from lipformer.flows import (
    AttentionFlow,
    InvertibleResidual,
    to_freia,
    to_normflows,
    to_torch_transform,
)
from lipformer.flows.log_det import methods
from tests.flows.test_adapters import HOSTS
from tests.layers.battery import scrambled

SMALL: dict[str, Any] = {"depth": 1, "num_heads": 2, "hidden": 8, "width": 4}
# What the flow is, the host's events, and the options of its adapter.
NATURAL: dict[str, tuple[dict[str, Any], tuple[int, ...], dict[str, Any]]] = {
    "sets": ({"dim": 2, "seq_len": 3}, (3, 2), {}),
    "vectors, one token": ({"dim": 3, "mode": "causal"}, (3,), {"vectors": "token"}),
    "vectors, tokens": ({"dim": 1, "mode": "causal"}, (3,), {"vectors": "tokens"}),
}


def as_tokens(x: Tensor, options: dict[str, Any]) -> Tensor:
    return {"token": x.unsqueeze(-2), "tokens": x.unsqueeze(-1), None: x}[options.get("vectors")]


@pytest.fixture
def dtype(name: str) -> Iterator[torch.dtype]:
    """The default dtype, in which some hosts draw their noise, whatever the flow's."""
    dtype = torch.float32 if name == "vectors, one token" else torch.float64
    torch.set_default_dtype(dtype)
    yield dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", NATURAL)
def test_natural_shapes(host: str, name: str, dtype: torch.dtype) -> None:
    arguments, event, options = NATURAL[name]
    flow = AttentionFlow(**arguments, **SMALL)
    density = HOSTS[host](flow, event, **options)
    x = 1.0 + torch.randn(6, *event)
    optimiser = torch.optim.Adam(flow.parameters(), lr=0.1)
    (-density.log_prob(x).mean()).backward()
    optimiser.step()
    flow.eval()
    expected = flow.log_prob(as_tokens(x, options)).detach()
    tolerance: dict[str, Any] = {"rtol": 0, "atol": 1e-5}
    # Normflows adds in float32.
    tolerance["check_dtype"] = host != "Normflows"
    with torch.no_grad(), lf.frozen(flow):
        found = density.log_prob(x)
        assert torch.equal(found, density.log_prob(x))
        torch.testing.assert_close(found, expected, **tolerance)
        torch.testing.assert_close(density.log_prob(x.flip(0)), expected.flip(0), **tolerance)
        torch.testing.assert_close(density.log_prob(x[2:3]), expected[2:3], **tolerance)
        if host in ("Normflows", "Nflows"):  # torch's Independent takes no empty batch
            assert density.log_prob(x[:0]).shape == (0,)
        to_noise(host, density.adapted, x[:0])
    with torch.inference_mode(), lf.frozen(flow):
        torch.testing.assert_close(density.log_prob(x), expected, **tolerance)
        drawn = density.sample(1)
        assert (drawn.shape, drawn.dtype) == ((1, *event), dtype)
        torch.testing.assert_close(
            density.log_prob(drawn), flow.log_prob(as_tokens(drawn, options)), **tolerance
        )


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("kind", ["one token of 2", "2 tokens", "1 token of 1"])
def test_densities_integrate_to_one(host: str, kind: str) -> None:
    """By the rectangle rule, exact for smooth densities as soon as the step is small enough."""
    size, vectors = {"one token of 2": (2, "token"), "2 tokens": (2, "tokens")}.get(kind, (1, "tokens"))
    flow = scrambled(AttentionFlow(size if vectors == "token" else 1, mode="causal", **SMALL)).eval()
    density = HOSTS[host](flow, (size,), vectors=vectors, event_shape=(size,))
    axis = torch.linspace(-12.0, 12.0, 97)
    x = torch.cartesian_prod(*[axis] * size).reshape(-1, size)
    with torch.no_grad():
        total = density.log_prob(x).double().exp().sum() * (0.25**size)
    assert abs(float(total) - 1.0) < 1e-4


def to_noise(host: str, adapted: Any, x: Tensor) -> Any:
    calls = {
        "Torch": lambda: adapted.inv(x),
        "Pyro": lambda: adapted.inv(x),
        "Zuko": lambda: adapted()(x),
        "Normflows": lambda: adapted.inverse(x),
        "Nflows": lambda: adapted(x),
        "Freia": lambda: adapted((x,)),
    }
    return calls[host]()


WRONG: dict[str, list[tuple[int, ...]]] = {
    "sets": [(3, 2), (4, 3, 1), (4, 3, 3), (4, 4, 2), (4, 1, 2), (4, 0, 2), (5,)],
    "vectors, one token": [(4, 2), (4, 1), (4, 0), (2,), (4, 3, 1)],
    "vectors, tokens": [(4, 1), (4, 0), (4,)],
}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", NATURAL)
def test_what_does_not_fit_raises_and_says_both_shapes(host: str, name: str) -> None:
    """Above all events of size 1, which would fit the base by broadcasting."""
    arguments, event, options = NATURAL[name]
    density = HOSTS[host](AttentionFlow(**arguments, **SMALL).eval(), event, **options)
    any_batch = host in ("Torch", "Pyro", "Zuko")
    for shape in WRONG[name]:
        if any_batch and shape == (3, 2):
            continue  # one event of the flow's own length
        with pytest.raises(ValueError, match=r"events have shape \(.*, got " + re.escape(str(shape))):
            to_noise(host, density.adapted, torch.zeros(shape))
        with pytest.raises(ValueError, match=r"got|shape|size"):
            density.log_prob(torch.zeros(shape))
    if not any_batch:
        with pytest.raises(ValueError, match=r"events have shape \(B, "):
            to_noise(host, density.adapted, torch.zeros(2, 4, *event))


def test_a_base_would_take_one_token_for_five() -> None:
    """Why a size of 1 must be named: the negative control of the test above."""
    import normflows as nf

    base = nf.distributions.DiagGaussian((5, 4))
    assert base.log_prob(torch.zeros(3, 1, 4)).shape == (3,)
    flow = AttentionFlow(4, mode="causal", **SMALL).eval()
    with pytest.raises(ValueError, match=r"say event_shape=\(1, 4\) if it is meant"):
        nf.NormalizingFlow(base, [to_normflows(flow)]).log_prob(torch.zeros(3, 1, 4))
    one = nf.NormalizingFlow(
        nf.distributions.DiagGaussian((1, 4)), [to_normflows(flow, event_shape=(1, 4))]
    )
    x = torch.randn(3, 1, 4)
    torch.testing.assert_close(one.log_prob(x), flow.log_prob(x))
    with pytest.raises(ValueError, match=r"shape \(B, 1, 4\), got \(3, 2, 4\)"):
        one.log_prob(torch.zeros(3, 2, 4))


def test_the_adapter_says_what_does_not_fit_the_block() -> None:
    flow = AttentionFlow(4, seq_len=6, **SMALL)
    with pytest.raises(ValueError, match="vectors must be None or one of token, tokens, got 'rows'"):
        to_torch_transform(flow, vectors="rows")
    with pytest.raises(ValueError, match="tokens of 1 feature, the block takes 4"):
        to_torch_transform(flow, vectors="tokens")
    for shape in ((7, 4), (6, 3), (6,), (0, 4)):
        with pytest.raises(ValueError, match=r"\(T <= 6, 4\), got " + re.escape(str(shape))):
            to_torch_transform(flow, event_shape=shape)
    with pytest.raises(ValueError, match=r"shape \(4,\), got \(3,\)"):
        to_freia(flow, [(3,)], vectors="token")
    # Torch asks for the shape of a base when a density is made of it.
    with pytest.raises(ValueError, match=r"shape \(\*, T <= 6, 4\), got \(5, 3\)"):
        TransformedDistribution(Normal(torch.zeros(5, 3), 1.0), [to_torch_transform(flow)])


def test_the_length_stays_free() -> None:
    """One adapter of a causal flow serves bases of several lengths."""
    flow = scrambled(AttentionFlow(1, mode="causal", **SMALL)).eval()
    transform = to_torch_transform(flow, vectors="tokens")
    assert transform.domain.event_dim == transform.codomain.event_dim == 1
    for length in (2, 5):
        base = MultivariateNormal(torch.zeros(length), torch.eye(length))
        density = TransformedDistribution(base, [transform])
        x = density.sample((2, 3))
        assert x.shape == (2, 3, length)
        expected = flow.log_prob(x.reshape(6, length, 1)).reshape(2, 3)
        torch.testing.assert_close(density.log_prob(x), expected)


@pytest.mark.parametrize("host", ["Torch", "Pyro", "Zuko"])
def test_a_single_vector(host: str) -> None:
    flow = scrambled(AttentionFlow(3, mode="causal", **SMALL)).eval()
    density = HOSTS[host](flow, (3,), vectors="token").density
    one = density.sample()
    assert one.shape == (3,)
    torch.testing.assert_close(density.log_prob(one), flow.log_prob(one.reshape(1, 1, 3))[0])


@pytest.mark.parametrize("host", HOSTS)
def test_eval_mode_through_the_host(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's module switches the block; where there is none, in torch, the block itself is asked."""
    monkeypatch.setattr(methods, "EXACT_LIMIT", 1)  # a series, whose probes would be random
    branch = lf.L2MultiheadAttention(4, 2, batch_first=True)
    block = InvertibleResidual(branch, 0.2, seq_len=5)
    density, x = HOSTS[host](block), torch.randn(4, 5, 4)
    network = getattr(density, "network", density.adapted)
    switch = network if isinstance(network, torch.nn.Module) else block
    assert (switch is block) == (host == "Torch")
    assert not torch.equal(density.log_prob(x), density.log_prob(x)), "unbiased estimates"
    switch.eval()
    found = density.log_prob(x)
    assert block.log_det_record.method == "series"
    assert bool((block.log_det_record.standard_error > 0).all())
    assert torch.equal(density.log_prob(x), found)
    torch.testing.assert_close(density.log_prob(x.flip(0)).flip(0), found)
    torch.testing.assert_close(density.log_prob(x[1:2]), found[1:2])
    switch.train()
    assert not torch.equal(density.log_prob(x), density.log_prob(x))
