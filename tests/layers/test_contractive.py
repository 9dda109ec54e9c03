"""Contractive: a module divided by its own bound."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import lipformer as lf
from tests.layers.battery import CertifiedLayer, slow_compile


class ContractiveBattery(CertifiedLayer):
    """Padding goes through; the constant is the coefficient in the norm of the division."""

    variants = ("plain", "padded")
    norm: ClassVar[str | None] = "l2"

    def inner(self) -> nn.Module:
        raise NotImplementedError

    def make(self) -> nn.Module:
        return lf.Contractive(self.inner(), 0.9, norm=self.norm, seq_len=self.tokens[0])

    def call(self, module: nn.Module, x: Tensor, variant: str = "plain") -> Tensor:
        mask = torch.arange(x.shape[1]).eq(1).expand(x.shape[:2]) if variant == "padded" else None
        return module(x, key_padding_mask=mask)

    def test_the_bound_is_the_coefficient_in_that_norm(self) -> None:
        module = self.made()
        bounds = {norm: self.bound(module, norm) for norm in module.norms}
        assert 0.9 in bounds.values()
        assert all(bound >= 0.9 * (1 - 1e-2) for bound in bounds.values())


class AttentionInside(ContractiveBattery):
    norms = ("l2", "token", "linf")
    options: ClassVar[dict[str, Any]] = {"value_proj": False}

    def inner(self) -> nn.Module:
        return lf.L2MultiheadAttention(8, 2, batch_first=True, **self.options)


class TestSmallestNorm(AttentionInside):
    norm = None


class TestL2(AttentionInside):
    options: ClassVar[dict[str, Any]] = {"causal": True, "positions": "alibi", "value_proj": False}
    test_compile = slow_compile


class TestToken(AttentionInside):
    norm = "token"
    attacked = (("token", "plain"),)
    options: ClassVar[dict[str, Any]] = {"value_proj": True}
    test_compile = slow_compile


class TestSelf(AttentionInside):
    norm = "self"
    norms = ("l2", "token", "linf", "self")
    attacked = (("self", "plain"),)
    options: ClassVar[dict[str, Any]] = {"value_proj": True, "causal": True, "window": 3}
    test_compile = slow_compile


class TestLinf(AttentionInside):
    norm = "linf"
    attacked = (("linf", "plain"),)
    options: ClassVar[dict[str, Any]] = {"value_proj": True}
    test_compile = slow_compile


class TestFeedForward(ContractiveBattery):
    least = 0.1

    def inner(self) -> nn.Module:
        return lf.FeedForward(8, 12, coeff=None, activation=nn.GELU())


class TestChain(ContractiveBattery):
    """One attention among other layers: its heads share what all of them are divided by."""

    norm = "self"
    norms = ("l2", "token", "linf", "self")
    attacked = (("self", "plain"),)
    test_compile = slow_compile

    def inner(self) -> nn.Module:
        options: dict[str, Any] = {"causal": True, "positions": "alibi", "slopes": (2.0, 0.01)}
        attention = lf.L2MultiheadAttention(12, 2, batch_first=True, **options)
        before = nn.Sequential(lf.TokenShift(8), nn.Linear(8, 12), lf.LipSwish())
        return nn.Sequential(before, attention, nn.Linear(12, 8))

    def test_each_head_has_its_factor(self) -> None:
        steep, flat = self.made().scales()
        assert steep > 1.2 * flat


class TestChainL2(TestChain):
    norm = None
    attacked = (("l2", "plain"), ("linf", "plain"))


class TestSequential(ContractiveBattery):
    """A block: attention in a residual, then a feed-forward part, all divided by one number."""

    norms = ("l2", "token")
    variants = ("plain", "padded")

    def inner(self) -> nn.Module:
        attention = lf.L2MultiheadAttention(8, 2, batch_first=True, value_proj=False)
        return nn.Sequential(lf.CenterNorm(8), lf.Residual(attention), nn.Linear(8, 8), nn.ReLU())

    test_compile = slow_compile


class TestResidual(CertifiedLayer):
    variants = ("plain", "padded")
    norms = ("l2", "token", "linf")
    call = ContractiveBattery.call
    least = 0.1

    def make(self) -> nn.Module:
        return lf.Residual(lf.L2MultiheadAttention(8, 2, batch_first=True, value_proj=False))

    test_compile = slow_compile


class TestConvexResidual(CertifiedLayer):
    least = 0.1

    def make(self) -> nn.Module:
        return lf.ConvexResidual(lf.FeedForward(8, 8), weight=0.4)

    def test_the_constant_is_one(self) -> None:
        assert 1.0 <= self.bound(self.made()) <= 1.0 + 1e-12
