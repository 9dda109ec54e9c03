"""Contexts in the hands of other flow libraries: their conditions reach the block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import normflows as nf
import pytest
import torch
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from pyro.distributions import conditional
from torch import Tensor
from torch.distributions import Independent, Normal, TransformedDistribution

from lipformer.flows import (
    ActNorm,
    AttentionFlow,
    to_freia,
    to_nflows,
    to_normflows,
    to_pyro,
    to_torch_transform,
    to_zuko,
)
from tests.flows.test_adapters import FrEIA  # without its warnings
from tests.layers.battery import scrambled

T, D, C = 3, 2, 4


def made() -> AttentionFlow:
    torch.manual_seed(0)
    options: dict[str, Any] = {"depth": 1, "num_heads": 1, "width": 4, "hidden": 8, "seq_len": T}
    return scrambled(AttentionFlow(D, **options, context_dim=C), 0.2).eval()  # type: ignore


def noise(*batch: int) -> Independent:
    return Independent(Normal(torch.zeros(*batch, T, D), 1.0), 2)


# What each host makes of a flow: log_prob(x, c), and samples (n, B, T, D) for contexts c (B, C).


def in_torch(flow: AttentionFlow) -> tuple[Any, Any]:
    def density(c: Tensor) -> TransformedDistribution:
        return TransformedDistribution(noise(len(c)), [to_torch_transform(flow, context=c)])

    return lambda x, c: density(c).log_prob(x), lambda n, c: density(c).sample((n,))


def in_zuko(flow: AttentionFlow) -> tuple[Any, Any]:
    import zuko  # not above: it switches off torch's validation of distributions

    zeros = torch.zeros(T, D)
    base = zuko.lazy.UnconditionalDistribution(
        zuko.distributions.DiagNormal, zeros, zeros + 1.0, ndims=2
    )
    made = zuko.lazy.Flow([to_zuko(flow)], base)
    return lambda x, c: made(c).log_prob(x), lambda n, c: made(c).sample((n,))


def in_pyro(flow: AttentionFlow) -> tuple[Any, Any]:
    transform = to_pyro(flow)
    assert isinstance(transform, conditional.ConditionalTransformModule)
    assert dict(transform.named_parameters())

    def density(c: Tensor) -> Any:
        return conditional.ConditionalTransformedDistribution(noise(len(c)), [transform]).condition(c)

    return lambda x, c: density(c).log_prob(x), lambda n, c: density(c).sample((n,))


def in_nflows(flow: AttentionFlow) -> tuple[Any, Any]:
    made = Flow(to_nflows(flow), StandardNormal((T, D)))
    return made.log_prob, lambda n, c: made.sample(n, context=c).transpose(0, 1)


def in_normflows(flow: AttentionFlow) -> tuple[Any, Any]:
    base = nf.distributions.DiagGaussian((T, D), trainable=False)
    made = nf.ConditionalNormalizingFlow(base, [to_normflows(flow)])
    return made.log_prob, lambda n, c: torch.stack([made.sample(len(c), context=c)[0] for _ in range(n)])


def in_freia(flow: AttentionFlow) -> tuple[Any, Any]:
    inn = FrEIA.framework.SequenceINN(T, D)
    inn.append(lambda dims_in, dims_c: to_freia(flow, dims_in, dims_c), cond=0, cond_shape=(C,))

    def log_prob(x: Tensor, c: Tensor) -> Tensor:
        z, log_det = inn(x, [c])
        return noise().log_prob(z) + log_det

    def sample(n: int, c: Tensor) -> Tensor:
        drawn = [inn(noise(len(c)).sample(), [c], rev=True)[0] for _ in range(n)]
        return torch.stack(drawn)

    return log_prob, sample


HOSTS: dict[str, Callable[[AttentionFlow], tuple[Any, Any]]] = {
    "torch": in_torch,
    "zuko": in_zuko,
    "pyro": in_pyro,
    "nflows": in_nflows,
    "normflows": in_normflows,
    "freia": in_freia,
}


@pytest.mark.parametrize("host", HOSTS)
def test_densities_and_samples_are_those_of_the_context(host: str) -> None:
    flow = made()
    log_prob, sample = HOSTS[host](flow)
    c = 3.0 * torch.randn(5, C)
    x = torch.randn(5, T, D)
    torch.testing.assert_close(log_prob(x, c), flow.log_prob(x, context=c), rtol=1e-4, atol=1e-4)
    assert (log_prob(x, c) - log_prob(x, c.flip(0)))[:2].abs().min() > 1e-3
    given = c.clone().requires_grad_()
    torch.testing.assert_close(
        torch.autograd.grad(log_prob(x, given).sum(), given),
        torch.autograd.grad(flow.log_prob(x, context=given).sum(), given),
        rtol=1e-3,
        atol=1e-3,
    )
    drawn = sample(2, c)
    assert drawn.shape == (2, 5, T, D)
    # Noise again, by its own context: of the standard normal.
    for each in drawn:
        assert flow(each, context=c).abs().max() < 6.0
        assert flow.inverse(flow(each, context=c), context=c).allclose(each, atol=1e-3)
    with pytest.raises(ValueError, match="takes a context"):
        log_prob(x, c[:, :2]) if host != "freia" else log_prob(x, c[:3])


def test_zuko_and_torch_broadcast_contexts() -> None:
    flow = made()
    x = torch.randn(4, 5, T, D)
    c = torch.randn(5, C)
    transform = to_zuko(flow)(c)
    z = transform(x)
    log_det = transform.log_abs_det_jacobian(x, z)
    assert log_det.shape == (4, 5)
    expected = flow.forward_and_log_det(x[3], context=c)
    torch.testing.assert_close((z[3], log_det[3]), expected)
    one = to_torch_transform(flow, context=c).inv(x[0, 0])
    torch.testing.assert_close(one, flow(x[0, 0].expand(5, -1, -1), context=c))
    all_alike = to_torch_transform(flow, context=c[0]).inv(x)
    torch.testing.assert_close(all_alike[2], flow(x[2], context=c[0]))


def test_a_kept_pair_is_that_of_its_context() -> None:
    flow, x = made(), torch.randn(1, T, D)
    c = torch.zeros(1, C)
    transform = to_torch_transform(flow, context=c)
    z = transform.inv(x)
    c += 1.0
    now = flow.forward_and_log_det(x, context=c)[1]
    torch.testing.assert_close(transform.log_abs_det_jacobian(z, x), -now)


def test_what_is_refused() -> None:
    flow, x, c = made(), torch.zeros(2, T, D), torch.zeros(2, C)
    plain = ActNorm(D)
    for call in (
        lambda: to_zuko(plain)(c),
        lambda: to_nflows(plain)(x, context=c),
        lambda: to_normflows(plain)(x, context=c),
        lambda: to_torch_transform(plain, context=c)(x),
        lambda: to_pyro(plain, context=c)(x),
    ):
        with pytest.raises(
            ValueError, match=r"takes no condition \(context, c\), but got one of \(2, 4\)"
        ):
            call()
    with pytest.raises(ValueError, match=r"context_dim=4, got dims_c=\[\(3,\)\]"):
        to_freia(flow, [(T, D)], [(3,)])
    for call in (lambda: to_zuko(flow)()(x), lambda: to_nflows(flow)(x)):
        with pytest.raises(ValueError, match="takes a context.*got None"):
            call()
