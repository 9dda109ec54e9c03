"""Layers: modules with weights that certify can bound."""

from lipformer.layers.activations import LipSwish, MaxMin
from lipformer.layers.attention import bound, own_token  # noqa: F401  rules
from lipformer.layers.attention.key_cache import KeyCache
from lipformer.layers.attention.multihead import L2MultiheadAttention
from lipformer.layers.attention.null_key import NullKeyAttention
from lipformer.layers.branch import Call
from lipformer.layers.context import ContextBias
from lipformer.layers.contractive import Contractive
from lipformer.layers.convert.conversion import Conversion, convert_attention
from lipformer.layers.convert.distill import Distillation, distill_attention
from lipformer.layers.decoding import register_step, step_module
from lipformer.layers.feed_forward import FeedForward
from lipformer.layers.freezing import frozen
from lipformer.layers.layer import Layer, bake, register_bake
from lipformer.layers.own_token import register_own_token
from lipformer.layers.pair_radial import PairRadial
from lipformer.layers.past_bias import PastBias
from lipformer.layers.residual import ConvexResidual, Residual
from lipformer.layers.spectral import SpectralBound, SpectralLinear, spectral_bound
from lipformer.layers.token_mean import SubtractMean, TokenMean
from lipformer.layers.token_norms import BallProjection, CenterNorm
from lipformer.layers.token_window import TokenShift, TokenStack
from lipformer.layers.token_wise import register_token_wise

__all__ = [
    "BallProjection",
    "Call",
    "CenterNorm",
    "ContextBias",
    "Contractive",
    "Conversion",
    "ConvexResidual",
    "Distillation",
    "FeedForward",
    "KeyCache",
    "L2MultiheadAttention",
    "Layer",
    "LipSwish",
    "MaxMin",
    "NullKeyAttention",
    "PairRadial",
    "PastBias",
    "Residual",
    "SpectralBound",
    "SpectralLinear",
    "SubtractMean",
    "TokenMean",
    "TokenShift",
    "TokenStack",
    "bake",
    "convert_attention",
    "distill_attention",
    "frozen",
    "register_bake",
    "register_own_token",
    "register_step",
    "register_token_wise",
    "spectral_bound",
    "step_module",
]
