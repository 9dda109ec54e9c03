"""lipformer: attention you can put a number on.

Drop-in layers for Transformers whose Lipschitz constant is known and certified.
"""

from lipformer import analysis, functional, models
from lipformer.certificate import (
    Ask,
    Attack,
    Bound,
    Certificate,
    Estimate,
    NotCertifiable,
    attack_lipschitz,
    certify,
    estimate_lipschitz,
    register_bound,
)
from lipformer.flows import ActNorm, InvertibleResidual
from lipformer.layers import (
    BallProjection,
    CenterNorm,
    Contractive,
    ConvexResidual,
    FeedForward,
    KeyCache,
    L2MultiheadAttention,
    LipSwish,
    MaxMin,
    Residual,
    SpectralBound,
    SpectralLinear,
    TokenShift,
    bake,
    convert_attention,
    frozen,
    spectral_bound,
)

__version__ = "0.1.0"

__all__ = [
    "ActNorm",
    "Ask",
    "Attack",
    "BallProjection",
    "Bound",
    "CenterNorm",
    "Certificate",
    "Contractive",
    "ConvexResidual",
    "Estimate",
    "FeedForward",
    "InvertibleResidual",
    "KeyCache",
    "L2MultiheadAttention",
    "LipSwish",
    "MaxMin",
    "NotCertifiable",
    "Residual",
    "SpectralBound",
    "SpectralLinear",
    "TokenShift",
    "analysis",
    "attack_lipschitz",
    "bake",
    "certify",
    "convert_attention",
    "estimate_lipschitz",
    "frozen",
    "functional",
    "models",
    "register_bound",
    "spectral_bound",
]
