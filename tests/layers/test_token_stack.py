"""TokenStack: its values, constants in every norm, steps, padding and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lipformer as lf
from lipformer.layers import TokenStack
from lipformer.layers.own_token import push_own
from tests.oracles import dense_jacobian


@pytest.fixture
def layer() -> TokenStack:
    stack = TokenStack(4, 3).double()
    nn.init.normal_(stack.raw)
    return stack


def test_values(layer: TokenStack) -> None:
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    out = layer(x).unflatten(-1, (3, 4))
    for i in range(5):
        for k in range(3):
            expected = layer.shares[k] * x[:, i - k] if i >= k else torch.zeros(2, 4).double()
            torch.testing.assert_close(out[:, i, k], expected)
    torch.testing.assert_close(
        layer.shares.square().sum(), torch.tensor(1.0).double(), rtol=3e-6, atol=0
    )


def test_constants_are_reached(layer: TokenStack) -> None:
    """With equal entries in all tokens the token norm's is; the others are norms of the Jacobian."""
    x = torch.randn(6, 4, dtype=torch.float64)
    jacobian = dense_jacobian(lambda y: layer(y[None])[0], x)
    bounds = {norm: lf.certify(layer, norm=norm).bound for norm in ("l2", "token", "linf", "self")}
    assert bounds["l2"] == pytest.approx(float(torch.linalg.matrix_norm(jacobian, 2)), rel=1e-9)
    assert bounds["linf"] == pytest.approx(float(jacobian.abs().sum(1).max()), rel=1e-9)
    one = torch.ones(1, 6, 4, dtype=torch.float64) / 2.0
    assert bounds["token"] == pytest.approx(layer(one).norm(dim=-1).max().item(), rel=1e-9)
    assert bounds["self"] == pytest.approx(layer.shares[0].item(), rel=1e-9)
    assert max(bounds["l2"], bounds["token"]) < 1.0


def test_steps_and_padding(layer: TokenStack) -> None:
    x = torch.randn(2, 7, 4, dtype=torch.float64)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, :3] = True
    full = layer(x, padding)
    torch.testing.assert_close(full[1, 3:], layer(x[1:, 3:])[0])
    rows, cache = [], None
    for i, j in ((0, 1), (1, 2), (2, 5), (5, 7)):
        row, cache = layer.step(x[:, i:j], cache, padding[:, i:j])
        rows.append(row)
    torch.testing.assert_close(torch.cat(rows, 1), full)


def test_a_token_moves_itself_by_its_share(layer: TokenStack) -> None:
    x, tangents = torch.randn(1, 5, 4).double(), torch.randn(2, 1, 5, 4).double()
    out, pushed = push_own(layer, x, tangents)
    assert torch.equal(out, layer(x))
    jacobian = dense_jacobian(lambda y: layer(y[None])[0], x[0]).view(5, 12, 5, 4)
    expected = torch.einsum("iaib,rnib->rnia", jacobian, tangents)
    torch.testing.assert_close(pushed, expected)


def test_bad_input(layer: TokenStack) -> None:
    with pytest.raises(ValueError, match="count must be a positive integer, got 0"):
        TokenStack(4, 0)
    with pytest.raises(ValueError, match=r"x must be \(B, N, 4\)"):
        layer(torch.zeros(1, 3, 5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [1, 3, 5, 11])
def test_rounded_shares_stay_below_one(dtype: torch.dtype, count: int) -> None:
    stack = TokenStack(2, count).to(dtype)
    assert lf.certify(stack, norm="token").bound <= 1.0
    assert lf.certify(stack, norm="token").bound >= 1.0 - 2.0 * torch.finfo(dtype).eps - 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_share_that_vanishes_keeps_a_gradient(dtype: torch.dtype) -> None:
    stack = TokenStack(2, 3).to(dtype)
    with torch.no_grad():
        stack.raw[1] = 250.0
    stack(torch.randn(1, 4, 2).to(dtype)).sum().backward()
    assert stack.raw.grad is not None
    assert bool(torch.isfinite(stack.raw.grad).all())


@pytest.mark.parametrize("shape", [(1,), (5,), (3, 4)])
def test_other_shares_are_certified_as_they_run(layer: TokenStack, shape: tuple[int, ...]) -> None:
    """One share for three tokens was multiplied by three times, and certified once."""
    layer.raw = nn.Parameter(torch.randn(shape).double())
    jacobian = dense_jacobian(lambda y: layer(y[None])[0], torch.randn(3, 4, dtype=torch.float64))
    assert float(torch.linalg.matrix_norm(jacobian, 2)) <= lf.certify(layer).bound
    with pytest.raises(AttributeError):
        layer.count = 7  # type: ignore[misc]


@pytest.mark.parametrize("cache", [torch.zeros(3, 2, 4), torch.zeros(2, 1, 4), (None,)], ids=str)
def test_a_cache_of_another_layer_is_refused(layer: TokenStack, cache: object) -> None:
    with pytest.raises(ValueError, match=r"cache must be None or the tensor \(2, 2, 4\) of the step"):
        layer.step(torch.zeros(2, 1, 4).double(), cache)  # type: ignore[arg-type]
