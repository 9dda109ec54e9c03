"""ContextBias: a translation by a context, in every norm and at any size of the context."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.layers import ContextBias, step_module
from lipformer.layers.branch import call_branch, context_dim_of
from tests.layers.battery import CertifiedLayer, slow_compile
from tests.oracles import dense_jacobian


def contexts(x: Tensor, dim: int = 3) -> Tensor:
    """One for each sample, of sizes from 0.1 to 100."""
    directions = torch.linspace(-1.0, 1.0, dim, dtype=x.dtype).expand(len(x), -1)
    return directions * torch.logspace(-1, 2, len(x), dtype=x.dtype)[:, None]


class TestContextBias(CertifiedLayer):
    least = 0.99

    def make(self) -> nn.Module:
        return ContextBias(8, 3)

    def call(self, module: nn.Module, x: Tensor, variant: str = "plain") -> Tensor:
        return module(x, contexts(x))

    test_compile = slow_compile
    # Contexts of size 100 are rounded as large numbers are.
    test_autocast = None  # type: ignore[assignment]


def branch() -> nn.Sequential:
    """W' LipSwish(W x + U c)."""
    return nn.Sequential(
        lf.SpectralLinear(4, 8), ContextBias(8, 3), lf.LipSwish(), lf.SpectralLinear(8, 4)
    )


WRAPPERS = {
    "contractive": lambda: lf.Contractive(branch(), 0.7),
    "residual": lambda: lf.Residual(branch()),
    "convex": lambda: lf.ConvexResidual(lf.Residual(branch()), 0.3),
    "baked": lambda: lf.bake(lf.Contractive(branch(), 0.7)),
    "attention": lambda: lf.Contractive(
        nn.Sequential(
            lf.SpectralLinear(4, 8),
            ContextBias(8, 3),
            lf.LipSwish(),
            lf.L2MultiheadAttention(8, 2, batch_first=True, causal=True, positions="alibi"),
            lf.SpectralLinear(8, 4),
        ),
        0.7,
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_every_wrapper_passes_the_context_on(name: str) -> None:
    module = WRAPPERS[name]().double().eval()
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    c = contexts(x)
    assert context_dim_of(module) == 3
    out = call_branch(module, x, None, None, c)
    assert (out - call_branch(module, x, None, None, c + 1.0)).abs().max() > 1e-3
    alone = call_branch(module, x[1:2], None, None, c[1:2])
    torch.testing.assert_close(out[1:2], alone, rtol=0, atol=1e-12)
    # Token by token, with the same context at each step.
    cache, found = None, []
    for token in x.split(1, dim=1):
        y, cache = step_module(module, token, cache, context=c)
        found.append(y)
    torch.testing.assert_close(torch.cat(found, 1), out, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match=r"takes a context \(B, 3\).*got no context with tokens"):
        call_branch(module, x)


@pytest.mark.parametrize("norm", ["l2", "linf", "self"])
def test_the_constant_holds_at_every_context(norm: str) -> None:
    module = lf.Contractive(branch(), 0.9, norm=norm).double()
    bound = lf.certify(module, norm=norm).bound
    assert bound <= 0.9 * (1 + 1e-9)
    found = []
    for size in (1.0, 1e3):
        c = size * torch.randn(1, 3, dtype=torch.float64)
        x0 = torch.randn(1, 3, 4, dtype=torch.float64)
        fn = lambda x, c=c: module(x, context=c)  # noqa: E731
        if norm == "self":
            blocks = dense_jacobian(fn, x0).view(3, 4, 3, 4)
            own = torch.stack([blocks[i, :, i] for i in range(3)])
            found.append(torch.linalg.matrix_norm(own, 2).max().item())
        else:
            found.append(lf.attack_lipschitz(fn, x0, norm=norm, steps=6, restarts=2).value)
    assert max(found) <= bound * (1 + 1e-9)
    assert max(found) > 0.05, "the attack is too weak to tell"


class Multiplied(nn.Module):
    """The broken variant: y = x * (1 + U c), as steep as the context is large."""

    context_dim = 3

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 8)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return x * (1.0 + self.linear(context)).unsqueeze(-2)


class MultipliedBias(ContextBias):
    """The same in the clothes of ContextBias."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return x * (1.0 + self.linear(context)).unsqueeze(-2)


@pytest.mark.parametrize("broken", [Multiplied, lambda: MultipliedBias(8, 3)])
def test_a_context_that_multiplies_is_refused(broken: type[nn.Module]) -> None:
    parts = nn.Sequential(lf.SpectralLinear(4, 8), broken(), lf.LipSwish(), lf.SpectralLinear(8, 4))
    with pytest.raises(lf.NotCertifiable, match="Multiplied"):
        lf.InvertibleResidual(parts)


def test_a_context_that_multiplies_is_caught() -> None:
    """With a bound that claims what holds of a translation: the attack above would tell."""
    module = MultipliedBias(8, 3).double()
    c = 10.0 * torch.randn(1, 3, dtype=torch.float64)
    found = lf.attack_lipschitz(
        lambda x: module(x, c), torch.randn(1, 3, 8, dtype=torch.float64), steps=5, restarts=2
    )
    assert found.value > 2.0 * lf.certify(ContextBias(8, 3)).bound


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (2, 5, 3), (3,)])
def test_wrong_contexts_are_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="takes a context") as error:
        ContextBias(8, 3)(torch.zeros(2, 5, 8), torch.zeros(shape))
    assert str(shape) in str(error.value)
    assert str((2, 5, 8)) in str(error.value)
