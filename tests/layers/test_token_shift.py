"""TokenShift: its values, constants in every norm, steps, padding, and the blocks that hold it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.flows import supports_causal
from tests.layers.battery import WithoutParameters
from tests.oracles import dense_jacobian


class TestTokenShift(WithoutParameters):
    least = 0.99
    variants = ("plain", "padded")

    def make(self) -> nn.Module:
        return lf.TokenShift(8, shifted=3)

    def call(self, module: nn.Module, x: Tensor, variant: str = "plain") -> Tensor:
        if variant == "plain":
            return module(x)
        padded = torch.zeros(x.shape[:2], dtype=torch.bool)
        padded[:, 2] = True
        return module(x, padded)


def test_values() -> None:
    x = torch.randn(2, 5, 6)
    out = lf.TokenShift(6, shifted=2)(x)
    for i in range(5):
        assert torch.equal(out[:, i, :4], x[:, i, :4])
        expected = x[:, i - 1, 4:] if i else torch.zeros(2, 2)
        assert torch.equal(out[:, i, 4:], expected)


@pytest.mark.parametrize(
    ("shifted", "norm", "constant"),
    [
        (3, "l2", 1.0),
        (3, "linf", 1.0),
        (3, "self", 1.0),
        (3, "token", math.sqrt(2.0)),
        (0, "token", 1.0),
        (8, "token", 1.0),
        (8, "self", 1.0),
        (8, "l2", 1.0),
    ],
)
def test_constants(shifted: int, norm: str, constant: float) -> None:
    layer = lf.TokenShift(8, shifted=shifted)
    assert lf.certify(layer, norm=norm).bound == pytest.approx(constant, rel=1e-15, abs=0.0)


def test_the_token_constant_is_reached() -> None:
    x = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    assert lf.TokenShift(2)(x)[0, 1].norm().item() == pytest.approx(math.sqrt(2.0))


def test_the_jacobian_is_a_partial_isometry() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    jacobian = dense_jacobian(lambda y: lf.TokenShift(6)(y[None])[0], x)
    values = torch.linalg.svdvals(jacobian)
    assert bool(((values - 1).abs().minimum(values.abs()) < 1e-14).all())


@pytest.mark.parametrize("sizes", [(1,) * 6, (2, 1, 3), (6,)])
def test_steps_equal_the_whole(sizes: tuple[int, ...]) -> None:
    layer, x = lf.TokenShift(8), torch.randn(2, 6, 8)
    mask = torch.tensor([[False, True, False, False, True, False], [False] * 6])
    cache, rows = None, []
    for new, padded in zip(x.split(sizes, 1), mask.split(sizes, 1), strict=True):
        out, cache = layer.step(new, cache, padded)
        rows.append(out)
    assert torch.equal(torch.cat(rows, 1), layer(x, mask))


def test_padding_is_not_shown() -> None:
    layer, x = lf.TokenShift(8), torch.randn(1, 4, 8)
    mask = torch.tensor([[True, False, False, False]])
    other = x.clone()
    other[:, 0] = 1e6
    assert torch.equal(layer(x, mask)[:, 1:], layer(other, mask)[:, 1:])
    assert not torch.equal(layer(x)[:, 1:], layer(other)[:, 1:])


def branch() -> nn.Sequential:
    attention = lf.L2MultiheadAttention(
        8, 2, value_proj=False, causal=True, positions="alibi", batch_first=True
    )
    return nn.Sequential(lf.TokenShift(8), attention).double()


def test_attention_behind_it_looks_one_back() -> None:
    """What attention alone cannot: a far token before moves the row more than the token itself."""
    layer, x = branch(), torch.randn(1, 6, 8, dtype=torch.float64)
    assert supports_causal(layer)
    later = x.clone()
    later[:, 3] += 1.0
    moved = (layer[1](layer[0](later))[0] - layer[1](layer[0](x))[0]).abs().amax(-1)[0]
    assert moved[:3].max() == 0.0
    assert moved[4] > 0.0


@pytest.mark.parametrize("method", ["causal", "exact"])
def test_blocks_around_it_invert_and_have_a_log_determinant(method: str) -> None:
    block = lf.InvertibleResidual(branch(), 0.9, mode="causal")
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    y, log_det = block.forward_and_log_det(x, method=method)
    torch.testing.assert_close(block.inverse(y, tol=1e-12), x)
    for sample, value in zip(x, log_det, strict=True):
        jacobian = dense_jacobian(lambda s: block(s[None])[0], sample)
        torch.testing.assert_close(value, torch.linalg.slogdet(jacobian).logabsdet)


def test_a_block_in_which_all_is_shifted_is_not_blown_up() -> None:
    """A token's own effect is 0 there; divided by that, the branch was enlarged 900 000 times."""
    attention = branch()[1]
    for inner in (lf.TokenShift(8, 8), nn.Sequential(lf.TokenShift(8, 8), attention)):
        block = lf.InvertibleResidual(inner, 0.9, mode="causal")
        x = torch.randn(2, 32, 8, dtype=torch.float64)
        torch.testing.assert_close(block.inverse(block(x), tol=1e-12), x)
    plain = lf.InvertibleResidual(nn.Sequential(lf.TokenShift(8), attention), 0.9, mode="causal")
    torch.testing.assert_close(block.branch.scales(), plain.branch.scales())


class Before(nn.Module):
    """Each token becomes the one before it: 0 in the self norm, as its own rule says."""

    causal = True

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


@lf.register_bound(Before)
def _(module: Before, ask: lf.certificate.Ask) -> float:
    return 0.0 if ask.norm == "self" else 1.0


def test_a_branch_of_bound_zero_is_only_multiplied_by_coeff() -> None:
    block = lf.InvertibleResidual(Before(), 0.5, mode="causal")
    x = torch.randn(2, 32, 8, dtype=torch.float64)
    expected = x.clone()
    expected[:, 1:] += 0.5 * x[:, :-1]
    torch.testing.assert_close(block(x), expected)
    torch.testing.assert_close(block.inverse(expected, tol=1e-12), x)


def test_masks_as_attention_takes_them() -> None:
    layer, x = lf.TokenShift(8), torch.randn(2, 4, 8)
    padded = torch.tensor([[True, False, True, False], [False] * 4])
    additive = torch.zeros(2, 4).masked_fill(padded, -math.inf)
    assert torch.equal(layer(x, additive), layer(x, padded))
    for mask in (padded[:, :1], padded[:1], padded.float()):
        with pytest.raises(
            ValueError, match=r"= \(2, 4\), got torch.\w+ \([12], |only 0 and -inf, got 1.0"
        ):
            layer(x, mask)


def test_tokens_without_a_batch() -> None:
    layer, x = lf.TokenShift(8), torch.randn(4, 8)
    mask = torch.tensor([True, False, True, False])
    assert torch.equal(layer(x, mask), layer(x[None], mask[None])[0])
    block = lf.Contractive(branch(), norm="self")
    torch.testing.assert_close(block(x.double()), block(x.double()[None])[0])


@pytest.mark.parametrize("wrap", [lf.Contractive, lf.Residual, lf.ConvexResidual, lf.certify])
def test_attention_along_the_other_axis_is_refused(wrap: Callable[[nn.Module], object]) -> None:
    """(N, B, D) attention behind the shift would look at other samples, or the shift would."""
    attention = lf.L2MultiheadAttention(8, 2, value_proj=False, max_len=8)
    message = r"0 \(TokenShift\) takes tokens as \(B, N, D\), but 1.*batch_first=False\) as \(N, B, D\)"
    for inner in (attention, lf.Contractive(attention)):
        with pytest.raises((ValueError, lf.NotCertifiable), match=message):
            wrap(nn.Sequential(lf.TokenShift(8), inner))
    attention.batch_first = True
    wrap(nn.Sequential(lf.TokenShift(8), attention))


@pytest.mark.slow
def test_a_block_around_it_is_exported_for_any_number_of_tokens() -> None:
    block, n = lf.InvertibleResidual(branch(), mode="causal"), torch.export.Dim("n", min=6, max=512)
    x = torch.randn(2, 20, 8, dtype=torch.float64)
    program = torch.export.export(block, (x,), dynamic_shapes=({1: n},))
    for length in (6, 70):
        other = torch.randn(2, length, 8, dtype=torch.float64)
        torch.testing.assert_close(program.module()(other), block(other), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shifted", [9, -1, 2.5, True, None])
def test_a_number_that_is_set_later_is_checked(shifted: object) -> None:
    layer = lf.TokenShift(4)
    with pytest.raises(ValueError, match=f"got 4 and {shifted}"):
        layer.shifted = shifted  # type: ignore[assignment]
    layer.shifted = 4
    assert lf.certify(layer, norm="token").bound == 1.0


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="got 4 and 5"):
        lf.TokenShift(4, shifted=5)
    with pytest.raises(ValueError, match=r"x must be \(B, N, 4\) or \(N, 4\), got \(2, 2, 2, 4\)"):
        lf.TokenShift(4)(torch.zeros(2, 2, 2, 4))
