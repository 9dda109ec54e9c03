"""estimate_lipschitz against dense Jacobians in float64: it agrees, and never goes above."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lipformer.estimates.attack import attack_lipschitz
from lipformer.estimates.estimate import estimate_lipschitz
from lipformer.functional.norms import NORMS
from tests.oracles import dense_jacobian, gains, l2_attention_oracle

ABOVE = 1e-9  # relative: how far an estimate may pass the dense value by rounding


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def attention(weight: Tensor, is_causal: bool) -> Callable[[Tensor], Tensor]:
    """(*, N, D) -> (*, N, D), one head and a nonlinearity behind it."""
    return lambda x: l2_attention_oracle((x @ weight)[..., None, :, :], is_causal).sin().squeeze(-3)


@pytest.mark.parametrize(("n", "d"), [(1, 3), (2, 2), (5, 1), (6, 2), (7, 4)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_agrees_with_the_dense_jacobian(n: int, d: int, is_causal: bool) -> None:
    for seed in (0, 2):
        generator = seeded(seed)
        weight = torch.randn(d, d, dtype=torch.float64, generator=generator)
        x = 10.0 ** (seed - 1) * torch.randn(n, d, dtype=torch.float64, generator=generator)
        fn = attention(weight, is_causal)
        for norm, dense in gains(dense_jacobian(fn, x), n, d).items():
            estimate = estimate_lipschitz(fn, x, norm=norm, generator=generator)
            assert dense * (1 - 1e-4) <= estimate.value <= dense * (1 + ABOVE), norm
            assert estimate.converged, norm
            assert estimate.norm == norm


@pytest.mark.parametrize(("rows", "columns"), [(40, 40), (90, 30), (30, 90)])
def test_l2_of_a_hard_spectrum(rows: int, columns: int) -> None:
    """Singular values close together: more steps than the search space has room for."""
    generator = seeded(0)
    u = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64, generator=generator)).Q
    v = torch.linalg.qr(torch.randn(columns, columns, dtype=torch.float64, generator=generator)).Q
    k = min(rows, columns)
    spectrum = 1 - torch.linspace(0, 1, k, dtype=torch.float64) ** 2
    weight = (u[:, :k] * spectrum) @ v[:k]
    x = torch.zeros(rows, dtype=torch.float64)
    estimate = estimate_lipschitz(lambda x: x @ weight, x, generator=generator)
    assert estimate.converged
    assert 1 - 1e-4 <= estimate.value <= 1 + ABOVE


def test_linf_is_exact_with_a_start_for_every_output() -> None:
    weight = torch.randn(12, 9, dtype=torch.float64, generator=seeded(0))
    estimate = estimate_lipschitz(
        lambda x: x @ weight, torch.zeros(12).double(), norm="linf", restarts=9, max_iter=1
    )
    assert estimate.value == pytest.approx(weight.abs().sum(0).max().item(), rel=1e-12)


@pytest.mark.parametrize("norm", NORMS)
def test_the_direction_attains_the_value(norm: str) -> None:
    generator = seeded(3)
    x = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    fn = attention(torch.randn(3, 3, dtype=torch.float64, generator=generator), False)
    estimate = estimate_lipschitz(fn, x, norm=norm, generator=generator)
    v = estimate.direction
    assert v.shape == x.shape
    image = (dense_jacobian(fn, x) @ v.flatten()).reshape(4, 3)
    size: dict[str, Callable[[Tensor], Tensor]] = {
        "l2": lambda t: t.norm(),
        "token": lambda t: t.norm(dim=-1).max(),
        "self": lambda t: t[v.norm(dim=-1).argmax()].norm(),
        "linf": lambda t: t.abs().max(),
    }
    assert size[norm](v).item() == pytest.approx(1, rel=1e-12)
    assert size[norm](image).item() == pytest.approx(estimate.value, rel=1e-10)
    if norm == "self":
        assert int((v.norm(dim=-1) > 0).sum()) == 1


@pytest.mark.parametrize("norm", NORMS)
def test_a_batch_has_the_largest_gain_of_its_samples(norm: str) -> None:
    generator = seeded(4)
    x = torch.randn(3, 5, 2, dtype=torch.float64, generator=generator)
    fn = attention(torch.randn(2, 2, dtype=torch.float64, generator=generator), True)
    each = [gains(dense_jacobian(fn, one), 5, 2)[norm] for one in x]
    value = estimate_lipschitz(fn, x, norm=norm, restarts=16, generator=generator).value
    assert value == pytest.approx(max(each), rel=1e-4)


def test_output_of_another_shape() -> None:
    """A classifier head: 3 tokens in, 4 logits out. "self" has no meaning there."""
    weight = torch.randn(2, 4, dtype=torch.float64, generator=seeded(0))

    def fn(x: Tensor) -> Tensor:
        return x.mean(dim=-2) @ weight

    x = torch.randn(3, 2, dtype=torch.float64)
    jacobian = dense_jacobian(fn, x)
    spectral = torch.linalg.matrix_norm(weight, 2).item()
    assert estimate_lipschitz(fn, x).value == pytest.approx(spectral / 3**0.5, rel=1e-6)
    assert estimate_lipschitz(fn, x, norm="token").value == pytest.approx(spectral, rel=1e-4)
    rows = jacobian.abs().sum(1).max().item()
    assert estimate_lipschitz(fn, x, norm="linf").value == pytest.approx(rows, rel=1e-12)
    with pytest.raises(ValueError, match=r"needs an output token.*\(3, 2\).*\(4,\)"):
        estimate_lipschitz(fn, x, norm="self")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_low_precision(dtype: torch.dtype, tolerance: float) -> None:
    weight = torch.randn(8, 8, generator=seeded(0)).to(dtype)
    estimate = estimate_lipschitz(lambda x: x @ weight, torch.zeros(4, 8, dtype=dtype))
    exact = torch.linalg.matrix_norm(weight.double(), 2).item()
    assert estimate.direction.dtype == dtype
    assert estimate.value == pytest.approx(exact, rel=tolerance)


def test_too_few_steps_are_not_called_converged() -> None:
    weight = torch.randn(64, 64, dtype=torch.float64, generator=seeded(0))
    x = torch.zeros(64, dtype=torch.float64)
    estimate = estimate_lipschitz(
        lambda x: x @ weight, x, tol=1e-10, max_iter=2, restarts=1, generator=seeded(0)
    )
    assert not estimate.converged
    assert 0 < estimate.value < torch.linalg.matrix_norm(weight, 2).item()


@pytest.mark.parametrize("norm", NORMS)
def test_zero_jacobian(norm: str) -> None:
    estimate = estimate_lipschitz(lambda x: 0 * x + 1, torch.ones(3, 2), norm=norm)
    assert estimate.value == 0
    assert estimate.converged


@pytest.mark.parametrize("train", [True, False])
def test_a_module_is_left_as_it_was(train: bool) -> None:
    """A tuple is unwrapped; dropout is linearised at one draw; no gradient, no change of mode."""
    layer = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).double().train(train)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        estimate = estimate_lipschitz(lambda x: layer(x, x, x, need_weights=False), x)
    assert estimate.converged
    assert layer.training is train
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    if not train:
        jacobian = dense_jacobian(lambda x: layer(x, x, x)[0], x)
        dense = torch.linalg.matrix_norm(jacobian, 2).item()
        assert estimate.value == pytest.approx(dense, rel=1e-4)


def test_masks_come_by_closure_and_inference_mode_does_no_harm() -> None:
    layer = nn.MultiheadAttention(4, 2, batch_first=True).double().eval()
    padded = torch.tensor([[False, False, True]])
    causal = nn.Transformer.generate_square_subsequent_mask(3).isinf()
    x = torch.randn(1, 3, 4, dtype=torch.float64)

    def fn(x: Tensor) -> Any:
        return layer(x, x, x, key_padding_mask=padded, attn_mask=causal, is_causal=True)

    with torch.inference_mode():
        value = estimate_lipschitz(fn, x).value
    dense = torch.linalg.matrix_norm(dense_jacobian(lambda x: fn(x)[0], x), 2).item()
    assert value == pytest.approx(dense, rel=1e-4)


class _Cube(torch.autograd.Function):
    """x^3 with a backward that cannot be differentiated, and with forward mode."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * tangent


class _Opaque(torch.autograd.Function):
    """A backward that is silently not differentiable, and no forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0].detach() ** 2 * grad.detach()


@pytest.mark.parametrize("norm", NORMS)
def test_forward_mode_where_double_backward_is_missing(norm: str) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 0.5]], dtype=torch.float64)
    estimate = estimate_lipschitz(_Cube.apply, x, norm=norm)
    assert estimate.value == pytest.approx(27, rel=1e-4)


def test_neither_mode_is_an_error_and_not_a_number() -> None:
    with pytest.raises(RuntimeError, match="neither double backward nor forward-mode"):
        estimate_lipschitz(_Opaque.apply, torch.ones(2, 2))


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, str]] = {
    "x": (torch.sin, torch.full((3, 2), torch.inf), "must be finite .* got 6 non-finite entries of 6"),
    "empty": (torch.sin, torch.ones(0, 2), "not empty, got 0 .* of 0"),
    "output": (lambda x: (x - 2).log(), torch.ones(3, 2), r"fn\(x\) must be finite .* got 6"),
    "detached": (lambda x: x.detach(), torch.ones(3, 2), "no gradient with respect to x"),
}


@pytest.mark.parametrize("search", [estimate_lipschitz, attack_lipschitz])
@pytest.mark.parametrize("name", REFUSED)
def test_functions_without_a_gain_are_refused(name: str, search: Callable[..., Any]) -> None:
    fn, x, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        search(fn, x)
    with pytest.raises(ValueError, match=r"norm must be one of l2, .* got 'l1'"):
        search(torch.sin, torch.ones(3, 2), norm="l1")


def test_a_jacobian_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="Jacobian of fn at x must be finite"):
        estimate_lipschitz(lambda x: (x - 1).sqrt(), torch.ones(3, 2))


@pytest.mark.parametrize("search", [estimate_lipschitz, partial(attack_lipschitz, steps=5)])
def test_a_generator_makes_it_reproducible(search: Callable[..., Any]) -> None:
    x, fn = torch.randn(6, 3, dtype=torch.float64), attention(torch.randn(3, 3).double(), False)
    first, second = (search(fn, x, generator=seeded(7)) for _ in range(2))
    assert first.value == second.value
    assert torch.equal(first.direction, second.direction)
