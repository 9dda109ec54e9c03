"""lipformer: attention layers with a certified Lipschitz constant.

Start with :class:`L2MultiheadAttention` and :func:`certify`; see docs/index.md.
"""

from lipformer import analysis, flows, functional, layers, models
from lipformer.certificate import NotCertifiable, certify, register_bound
from lipformer.estimates import attack_lipschitz, estimate_lipschitz
from lipformer.flows import ActNorm, InvertibleResidual
from lipformer.layers import (
    BallProjection,
    CenterNorm,
    Contractive,
    ConvexResidual,
    FeedForward,
    L2MultiheadAttention,
    LipSwish,
    MaxMin,
    Residual,
    SpectralLinear,
    TokenMean,
    TokenShift,
    bake,
    convert_attention,
    distill_attention,
    frozen,
    spectral_bound,
)
from lipformer.models import load_converted

__version__ = "0.1.0"

__all__ = [
    "ActNorm",
    "BallProjection",
    "CenterNorm",
    "Contractive",
    "ConvexResidual",
    "FeedForward",
    "InvertibleResidual",
    "L2MultiheadAttention",
    "LipSwish",
    "MaxMin",
    "NotCertifiable",
    "Residual",
    "SpectralLinear",
    "TokenMean",
    "TokenShift",
    "analysis",
    "attack_lipschitz",
    "bake",
    "certify",
    "convert_attention",
    "distill_attention",
    "estimate_lipschitz",
    "flows",
    "frozen",
    "functional",
    "layers",
    "load_converted",
    "models",
    "register_bound",
    "spectral_bound",
]
