"""Language models under torch.compile: one graph, one recompilation for other lengths."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import lipformer as lf

# What inductor imports on its first use is compiled with torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def steps(variant: str, backend: str) -> int:
    """Trains on four lengths, compiled and not; the number of graphs."""
    model = lf.models.VARIANTS[variant](11, dim=16, num_heads=2, num_layers=2, max_len=64)
    model.initialize(torch.randint(11, (2, 16)))
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for length in (32, 20, 51):
        tokens = torch.randint(11, (2, length))
        losses = [
            F.cross_entropy(run(tokens).flatten(0, 1), tokens.flatten()) for run in (compiled, model)
        ]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
        mine, theirs = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("variant", ["lipschitz", "invertible"])
def test_no_break_and_one_recompilation(variant: str) -> None:
    assert steps(variant, "eager") <= 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("variant", lf.models.VARIANTS)
def test_the_same_with_gradients_compiled(variant: str, backend: str) -> None:
    assert steps(variant, backend) <= 2


def test_a_break_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: reading a value back breaks the graph."""
    forward = lf.TokenShift.forward
    monkeypatch.setattr(
        lf.TokenShift, "forward", lambda self, x: forward(self, x) * (1 if x.sum().item() < 1e9 else 2)
    )
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        steps("l2", "eager")
