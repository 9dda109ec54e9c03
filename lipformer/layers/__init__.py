"""Layers: modules that hold weights and have a constant that certify knows."""

from lipformer.layers._activations import LipSwish, MaxMin
from lipformer.layers._bake import bake
from lipformer.layers._contractive import Contractive
from lipformer.layers._convert import convert_attention
from lipformer.layers._feed_forward import FeedForward
from lipformer.layers._frozen import frozen
from lipformer.layers._key_cache import KeyCache
from lipformer.layers._l2_multihead_attention import L2MultiheadAttention
from lipformer.layers._residual import ConvexResidual, Residual
from lipformer.layers._spectral import SpectralBound, SpectralLinear, spectral_bound
from lipformer.layers._step import step_module
from lipformer.layers._token_norms import BallProjection, CenterNorm
from lipformer.layers._token_shift import TokenShift

__all__ = [
    "BallProjection",
    "CenterNorm",
    "Contractive",
    "ConvexResidual",
    "FeedForward",
    "KeyCache",
    "L2MultiheadAttention",
    "LipSwish",
    "MaxMin",
    "Residual",
    "SpectralBound",
    "SpectralLinear",
    "TokenShift",
    "bake",
    "convert_attention",
    "frozen",
    "spectral_bound",
    "step_module",
]
