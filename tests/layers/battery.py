"""The battery that every certified layer passes: attacks, dtypes, steps, copies, compile, bake.

A layer's test is a subclass of `CertifiedLayer` that says how to make the layer and how to call it;
it inherits every test. What is particular to a layer is tested beside its subclass.
"""

from __future__ import annotations

import copy
import io
import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lipformer as lf
from tests.oracles import dense_jacobian, token_gain

SCALES = (1e-2, 1e-1, 1.0, 10.0, 100.0, 1e3)
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=3.0),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


def starting_inputs(n: int, d: int) -> Tensor:
    """(24, n, d): random, line, cluster and outlier tokens, each at the sizes 1e-2 to 1e3."""
    noise = torch.randn(n, d, dtype=torch.float64)
    line = 1e-3 * noise
    line[:, 0] += torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(n)[:n]
    line[-1] = 0.0  # a token that sees as many on either side: Theorems D and E
    cluster = 1e-2 * noise + torch.randn(2, d, dtype=torch.float64)[torch.arange(n) % 2]
    outlier = 1e-2 * noise
    outlier[n // 2] = 1.0
    return torch.stack([s * x for s in SCALES for x in (noise, line, cluster, outlier)])


def dense_jacobians(out: Tensor, x: Tensor) -> Tensor:
    """(S, M, K) of S independent samples: out (S, ...) with M entries each, x (S, ...) with K."""
    flat = out.flatten(1)
    rows = [torch.autograd.grad(flat[:, k].sum(), x, retain_graph=True)[0] for k in range(flat.shape[1])]
    return torch.stack([row.flatten(1) for row in rows], dim=1)


def largest_gain(jacobians: Tensor, norm: str, n: int) -> float:
    """The largest gain of some Jacobians (S, n d', n d) of n tokens, at least as large as shown.

    The token norm is computed for the two with the largest l2 norm only: it takes a search.
    """
    l2 = torch.linalg.matrix_norm(jacobians, 2)
    if norm == "l2":
        return l2.max().item()
    if norm == "linf":
        return jacobians.abs().sum(-1).max().item()
    blocks = jacobians.unflatten(1, (n, -1)).unflatten(3, (n, -1)).transpose(2, 3)  # S i j d' d
    if norm == "self":
        own = torch.diagonal(blocks, dim1=1, dim2=2).movedim(-1, 1)
        return torch.linalg.matrix_norm(own, 2).max().item()
    hardest = l2.topk(min(2, len(l2))).indices
    return max(token_gain(blocks[s, i], samples=256, rounds=30) for s in hardest for i in range(n))


def error(out: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected entry if that is above one."""
    assert out.shape == expected.shape
    largest = max(1.0, expected.abs().max().item())
    return (out.double() - expected.double()).abs().max().item() / largest


def scrambled(module: nn.Module, size: float = 0.3) -> nn.Module:
    """The module with noise on every parameter, so that no bias is zero and no weight special."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return module


def bounded_weights(module: nn.Module) -> list[tuple[Tensor, float]]:
    """Every weight that `spectral_bound` keeps at or below a number, as a matrix, and the number."""
    found = []
    for part in module.modules():
        if parametrize.is_parametrized(part, "weight") and isinstance(part, nn.Linear):
            coeff = part.parametrizations["weight"][-1].certified_coeff
            found.append((part.weight.detach().double(), coeff))
    return found


class CertifiedLayer:
    """Tests that every certified layer passes; a subclass gives `make` and the attributes below.

    Attributes:
        tokens: (N, D), the shape of one sample.
        norms: the norms that the layer has a bound in.
        attacked: the norms and variants that get a gradient attack besides the dense scan.
        variants: names of the ways to call the layer (masks), see `call`.
        least: the largest gain that is found in l2 is at least this part of the bound, or the
            attack would prove nothing.
    """

    tokens: ClassVar[tuple[int, ...]] = (5, 8)
    norms: ClassVar[tuple[str, ...]] = ("l2", "token", "self", "linf")
    attacked: ClassVar[tuple[tuple[str, str], ...]] = (("l2", "plain"),)
    variants: ClassVar[tuple[str, ...]] = ("plain",)
    least: ClassVar[float] = 0.02

    def make(self) -> nn.Module:
        raise NotImplementedError

    def call(self, module: nn.Module, x: Tensor, variant: str = "plain") -> Tensor:
        """The output for (B, *tokens), each sample for itself."""
        assert variant == "plain"
        return module(x)

    def starts(self, module: nn.Module) -> Tensor:
        """Inputs of the dense scan, (S, *tokens) in float64."""
        n, d = self.tokens
        return starting_inputs(n, d)

    # What follows is final.

    def made(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return scrambled(self.make())

    def inputs(self, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        return torch.randn(batch, *self.tokens, generator=generator).to(dtype)

    def bound(self, module: nn.Module, norm: str = "l2") -> float:
        return lf.certify(module, seq_len=self.tokens[0], norm=norm).bound

    def scanned(self, module: nn.Module, norm: str, variant: str = "plain") -> float:
        """The largest gain at the starts, by dense Jacobians of a float64 copy."""
        module = copy.deepcopy(module).double()
        x = self.starts(module).requires_grad_()
        jacobians = dense_jacobians(self.call(module, x, variant), x)
        return largest_gain(jacobians, norm, self.tokens[0])

    def assert_certified(self, module: nn.Module) -> None:
        found = self.scanned(module, "l2")
        bound = self.bound(module)
        assert math.isfinite(bound)
        assert found <= bound * (1 + 1e-9)

    def assert_weights_bounded(self, module: nn.Module) -> None:
        for mode in (True, False):
            module.train(mode)
            for weight, coeff in bounded_weights(module):
                assert torch.linalg.matrix_norm(weight, 2).item() <= coeff

    @torch.enable_grad()
    def step(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        out = self.call(module, self.inputs())
        (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).mean().backward()
        optimizer.step()

    # The tests.

    def test_no_start_exceeds_the_certificate(self) -> None:
        """Jacobians at every size from 1e-2 to 1e3, in every norm, under every mask."""
        module = self.made().double()
        x = self.starts(module).requires_grad_()
        for variant in self.variants:
            jacobians = dense_jacobians(self.call(module, x, variant), x)
            assert bool(torch.isfinite(jacobians).all())
            for norm in self.norms:
                found = largest_gain(jacobians, norm, self.tokens[0])
                assert found <= self.bound(module, norm) * (1 + 1e-9), (variant, norm)

    def test_no_attack_exceeds_the_certificate(self) -> None:
        module = self.made().double()
        x0 = self.inputs(1, torch.float64)
        for norm, variant in self.attacked:

            def fn(x: Tensor, variant: str = variant) -> Tensor:
                return self.call(module, x, variant)

            attack = lf.attack_lipschitz(fn, x0, norm=norm, steps=6, restarts=5)
            jacobian = dense_jacobian(fn, attack.input)[None]
            found = largest_gain(jacobian, norm, self.tokens[0])
            bound = self.bound(module, norm)
            assert attack.value <= bound * (1 + 1e-9), (variant, norm)
            assert found <= bound * (1 + 1e-9), (variant, norm)
            if norm == "l2":
                assert found >= self.least * bound, "the attack is too weak to tell"

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
    def test_dtypes(self, dtype: torch.dtype) -> None:
        module = self.made().to(dtype)
        for variant in self.variants:
            out = self.call(module, self.inputs(2, dtype), variant)
            assert out.dtype == dtype
            assert bool(torch.isfinite(out).all())
        exact = self.call(copy.deepcopy(module).double(), self.inputs(2, dtype).double())
        tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.1}[dtype]
        assert error(self.call(module, self.inputs(2, dtype)), exact) <= tolerance
        assert math.isfinite(self.bound(module))

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_certified_after_optimiser_steps(self, name: str) -> None:
        module = self.made()
        optimizer = OPTIMIZERS[name](module.parameters())
        self.call(module.eval(), self.inputs())  # a state kept from here would be stale below
        for _ in range(3):
            self.step(module.train(), optimizer)
            self.assert_weights_bounded(module)
        self.assert_certified(module.train())
        self.assert_certified(module.eval())

    def test_state_dict_round_trip(self) -> None:
        """Through a file, into a module with other weights: equal outputs, equal certificate."""
        module, other = self.made(), self.made(seed=1)
        x = self.inputs()
        if list(module.parameters()):
            assert not torch.equal(self.call(module, x), self.call(other, x))
        other.load_state_dict(saved(module))
        assert torch.equal(self.call(module, x), self.call(other, x))
        for norm in self.norms:
            assert self.bound(module, norm) == self.bound(other, norm)

    def test_deepcopy(self) -> None:
        module = self.made()
        twin = copy.deepcopy(module)
        x = self.inputs()
        expected, bound = self.call(module, x), self.bound(module)
        scrambled(module)  # a copy has its own weights
        assert torch.equal(self.call(twin, x), expected)
        assert self.bound(twin) == bound

    def test_moving_average(self) -> None:
        module = self.made()
        average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for _ in range(3):
            scrambled(module, 1.0)
            average.update_parameters(module)
        assert bool(torch.isfinite(self.call(average.module, self.inputs())).all())
        self.assert_weights_bounded(average.module)
        self.assert_certified(average.module)

    def test_autocast(self) -> None:
        module = self.made()
        bound = self.bound(module)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.call(module, self.inputs())
            assert self.bound(module) == pytest.approx(bound, rel=0.05)  # of the rounded weights
            self.assert_weights_bounded(module)
        assert bool(torch.isfinite(out).all())
        assert error(out, self.call(module, self.inputs())) <= 0.1
        if out.requires_grad:
            out.float().square().mean().backward()
            assert all(bool(torch.isfinite(p.grad).all()) for p in module.parameters())

    def test_inference_mode(self) -> None:
        module, x = self.made().eval(), self.inputs()
        expected, bound = self.call(module, x), self.bound(module)
        with torch.inference_mode():
            assert torch.equal(self.call(module, x), expected)
            assert self.bound(module) == bound

    def test_functional_call(self) -> None:
        module, other = self.made(), self.made(seed=1)
        state = {**dict(other.named_parameters()), **dict(other.named_buffers())}

        class Call(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = module

            def forward(self, x: Tensor) -> Tensor:
                return test.call(self.inner, x)

        test, x = self, self.inputs()
        out = functional_call(Call(), {f"inner.{name}": value for name, value in state.items()}, (x,))
        torch.testing.assert_close(out, self.call(other, x), rtol=0, atol=0)

    def test_bake(self) -> None:
        """Plain weights: the same outputs, nothing left to normalise, still certified."""
        module = self.made()
        baked = lf.bake(module)
        for variant in self.variants:
            out = self.call(baked, self.inputs(), variant)
            assert error(out, self.call(module, self.inputs(), variant)) <= 1e-5
        assert not any(parametrize.is_parametrized(part) for part in baked.modules())
        assert not any(isinstance(part, lf.Contractive) for part in baked.modules())
        self.assert_certified(baked)

    def test_gradient_reaches_every_parameter(self) -> None:
        module = self.made()
        out = self.call(module, self.inputs())
        (out * torch.randn_like(out)).sum().backward()
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            assert bool(torch.isfinite(parameter.grad).all()), name
            assert bool((parameter.grad != 0).any()), name

    def test_compile(self) -> None:
        """In one graph, forward and backward."""
        module, x = self.made(), self.inputs()
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: self.call(module, x), fullgraph=True, backend="aot_eager")
        expected, out = self.call(module, x), compiled(x)
        assert error(out, expected) <= 1e-6
        parameters = list(module.parameters())
        if parameters:
            got = torch.autograd.grad(out.square().mean(), parameters)
            want = torch.autograd.grad(expected.square().mean(), parameters)
            assert all(error(g, w) <= 1e-5 for g, w in zip(got, want, strict=True))


class WithoutParameters(CertifiedLayer):
    """The battery of a layer with no parameters: without the tests that train or average them."""

    test_certified_after_optimiser_steps = None  # type: ignore[assignment]
    test_moving_average = None  # type: ignore[assignment]
    test_gradient_reaches_every_parameter = None  # type: ignore[assignment]


@pytest.mark.slow
def slow_compile(test: CertifiedLayer) -> None:
    """`test_compile` of a battery whose graph a quick test of another battery has in essence."""
    CertifiedLayer.test_compile(test)


def saved(module: nn.Module) -> dict[str, Any]:
    """The module's state after a round trip through a file."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)
