"""The layer that CONTRIBUTING adds in one file is what its rules say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lipformer as lf
from tests.oracles import dense_jacobian

GUIDE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
MOST_LINES = 60


@pytest.fixture(scope="module")
def echo() -> Any:
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(block.splitlines()) < MOST_LINES
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(block, str(GUIDE), "exec"), names)
    layer = names["Echo"](4).double()
    with torch.no_grad():
        layer.raw.copy_(torch.tensor([0.3, -2.0, 0.0, 1.0]))
    return layer


def test_an_attack_does_not_pass_its_bound(echo: Any) -> None:
    for norm in ("l2", "token", "self", "linf"):
        bound = lf.certify(echo, norm=norm).bound
        reached = lf.attack_lipschitz(echo, torch.randn(1, 6, 4).double(), norm=norm, steps=5).value
        assert 0.8 * bound <= reached <= bound * (1 + 1e-9), norm


def test_steps_are_the_full_pass(echo: Any) -> None:
    x, cache, rows = torch.randn(2, 6, 4).double(), None, []
    model = nn.Sequential(nn.Linear(4, 4), lf.Residual(echo)).double()
    for part in x.split([3, 1, 2], dim=1):
        row, cache = lf.layers.step_module(model, part, cache)
        rows.append(row)
    torch.testing.assert_close(torch.cat(rows, dim=1), model(x))


def test_the_baked_layer_is_the_layer(echo: Any) -> None:
    x = torch.randn(2, 6, 4).double()
    baked = lf.bake(nn.Sequential(echo))
    assert not list(baked.parameters())
    assert torch.equal(baked(x), echo(x))
    shared = nn.Sequential(echo, lf.Contractive(echo, 0.9), lf.Contractive(echo, 0.3))
    torch.testing.assert_close(lf.bake(shared)(x), shared(x))


def test_its_causal_log_determinant_is_exact(echo: Any) -> None:
    x = torch.randn(2, 6, 4).double()
    block = lf.InvertibleResidual(nn.Sequential(nn.Linear(4, 4), echo), mode="causal").double()
    _, log_det = block.forward_and_log_det(x, method="causal")
    exact = torch.stack([torch.linalg.slogdet(dense_jacobian(block, one[None]))[1] for one in x])
    torch.testing.assert_close(log_det, exact)
