"""PastBias: a translation by earlier tokens of constant 1 in a token's own map, whatever they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.flows.log_det.exact import supports_causal
from lipformer.layers import PastBias, step_module
from lipformer.layers.branch import call_branch
from tests.layers.battery import CertifiedLayer, scrambled, slow_compile
from tests.oracles import dense_jacobian

F64 = torch.float64


def attention(causal: bool = True) -> nn.Module:
    positions = "alibi" if causal else None
    made = lf.L2MultiheadAttention(8, 2, batch_first=True, causal=causal, positions=positions)
    return nn.Sequential(lf.LipSwish(), made, nn.Linear(8, 8))


class TestPastBias(CertifiedLayer):
    variants = ("plain", "padded")

    def make(self) -> nn.Module:
        return PastBias(8, attention())

    def call(self, module: nn.Module, x: Tensor, variant: str = "plain") -> Tensor:
        padded = torch.zeros(x.shape[:2], dtype=torch.bool)
        padded[:, 3:] = variant == "padded"
        return module(x, padded)

    test_compile = slow_compile


def branch(past: nn.Module) -> nn.Sequential:
    """W' LipSwish(W x_i + g(W x_1, ..., W x_{i-1}))."""
    return nn.Sequential(
        lf.SpectralLinear(2, 8), PastBias(8, past), lf.LipSwish(), lf.SpectralLinear(8, 2)
    )


def test_values_and_steps() -> None:
    layer, x = PastBias(8, attention()).eval(), torch.randn(2, 6, 8)
    moved = torch.cat([torch.zeros(2, 1, 8), x[:, :-1]], 1)
    torch.testing.assert_close(layer(x), x + call_branch(layer.branch[1], moved))
    rows, cache = [], None
    for tokens in x.split([3, 1, 2], dim=1):
        row, cache = step_module(layer, tokens, cache)
        rows.append(row)
    torch.testing.assert_close(torch.cat(rows, 1), layer(x))


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_a_block_is_invertible_however_strong_the_past(size: float) -> None:
    block = lf.InvertibleResidual(scrambled(branch(attention())), 0.9, mode="causal").double()
    with torch.no_grad():
        block.branch.module[1].branch[1][2].weight.mul_(size)
    x = torch.randn(2, 5, 2, dtype=F64)
    jacobian = dense_jacobian(block, x[:1]).view(5, 2, 5, 2)
    own = torch.stack([jacobian[i, :, i] for i in range(5)]) - torch.eye(2, dtype=F64)
    assert torch.linalg.matrix_norm(own, 2).max() <= 0.9
    if size > 1.0:
        assert jacobian[3, :, 2].norm() > 0.9, "the past is not divided"
    assert lf.certify(block.branch, norm="self").bound == pytest.approx(0.9, rel=1e-12)
    y, log_det = block.forward_and_log_det(x)
    assert log_det[0].item() == pytest.approx(
        torch.linalg.slogdet(jacobian.view(10, 10))[1].item(), abs=1e-10
    )
    torch.testing.assert_close(block.inverse(y, tol=1e-12), x, rtol=0, atol=1e-8)
    torch.testing.assert_close(lf.bake(block)(x), y, rtol=0, atol=1e-12)


def test_a_past_that_sees_the_token_itself_is_refused() -> None:
    """Without a mask the token one place later is seen, which is the token itself."""
    layer = PastBias(8, attention(causal=False)).double()
    x = torch.randn(1, 4, 8, dtype=F64)
    own = dense_jacobian(layer, x).view(4, 8, 4, 8)[1, :, 1]
    assert (own - torch.eye(8, dtype=F64)).abs().max() > 1e-3, "so that 1 would be wrong"
    with pytest.raises(lf.NotCertifiable, match=r"branch\.1\.1 \(L2MultiheadAttention\) is not known"):
        lf.certify(layer, norm="self")
    with pytest.raises(ValueError, match="keep the shape"):
        PastBias(8, nn.Linear(8, 1))(x.float())


def _replaced(layer: PastBias) -> None:
    layer.branch[0] = nn.Identity()  # type: ignore[index]


def _set(layer: PastBias) -> None:
    layer.branch[0].shifted = 4  # type: ignore[index]


def _hooked(layer: PastBias) -> None:
    """The hook, like the forward below, is not what the attention's causal=True is about."""
    layer.branch[1].register_forward_pre_hook(lambda _, given: (given[0].flip(1),))  # type: ignore[index]


def _overridden(layer: PastBias) -> None:
    class Reversed(lf.L2MultiheadAttention):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return x.flip(1)

    layer.branch[1] = Reversed(8, 2, batch_first=True, causal=True)  # type: ignore[index]


def _unshifted(layer: PastBias) -> None:
    class Unshifted(lf.TokenShift):
        causal = True

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return x

    layer.branch[0] = Unshifted(8, 8)  # type: ignore[index]


@pytest.mark.parametrize("change", [_replaced, _set, _hooked, _overridden, _unshifted])
def test_a_past_that_was_changed_is_refused(change: Callable[[PastBias], None]) -> None:
    layer = PastBias(8, lf.L2MultiheadAttention(8, 2, batch_first=True, causal=True)).double()
    block = lf.InvertibleResidual(layer, 0.9, mode="causal")
    change(layer)
    x = torch.randn(1, 4, 8, dtype=F64)
    own = dense_jacobian(layer, x).view(4, 8, 4, 8)
    gaps = [own[i, :, i] - torch.eye(8, dtype=F64) for i in range(4)]
    assert torch.stack(gaps).abs().max() > 1e-3, "so that 1 would be wrong"
    assert not supports_causal(layer)
    for act in (lambda: lf.certify(layer, norm="self"), lambda: block(x)):
        with pytest.raises(lf.NotCertifiable, match="begins with a TokenShift|not known to be causal"):
            act()


def test_tokens_and_samples_are_told_apart() -> None:
    """In the self norm the branch is not asked, which refuses both in the others."""
    layer = PastBias(8, attention())
    with pytest.raises(lf.NotCertifiable, match="samples may influence each other"):
        lf.certify(layer, norm="self", example=torch.randn(4, 8))
    layer.branch[1] = lf.L2MultiheadAttention(8, 2, causal=True)  # type: ignore[index]
    with pytest.raises(lf.NotCertifiable, match="would mix samples"):
        lf.certify(layer, norm="self")
