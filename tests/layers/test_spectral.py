"""Weights of bounded spectral norm: SpectralLinear and the spectral_bound parametrization."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lipformer as lf
from tests.layers.battery import CertifiedLayer


class TestSpectralLinear(CertifiedLayer):
    least = 0.99

    def make(self) -> nn.Module:
        return lf.SpectralLinear(8, 8, coeff=0.5)


class TestSpectralLinearNormalize(CertifiedLayer):
    least = 0.99

    def make(self) -> nn.Module:
        return lf.SpectralLinear(8, 6, coeff=2.0, mode="normalize")
