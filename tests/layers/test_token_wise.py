"""Token-wise layers without a matrix: CenterNorm, BallProjection, MaxMin, LipSwish."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from tests.layers.battery import CertifiedLayer, WithoutParameters


class TestCenterNorm(WithoutParameters):
    least = 0.99

    def make(self) -> nn.Module:
        return lf.CenterNorm(8)


class TestCenterNormAffine(CertifiedLayer):
    least = 0.5

    def make(self) -> nn.Module:
        return lf.CenterNorm(8, elementwise_affine=True)


class TestBallProjection(WithoutParameters):
    norms = ("l2", "token", "self")
    least = 0.99

    def make(self) -> nn.Module:
        return lf.BallProjection(2.0)


class TestMaxMin(WithoutParameters):
    least = 0.99

    def make(self) -> nn.Module:
        return lf.MaxMin()


class TestLipSwish(WithoutParameters):
    least = 0.99

    def make(self) -> nn.Module:
        return lf.LipSwish()
