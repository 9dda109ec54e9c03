"""Certified bounds of Lipschitz constants, and lower estimates to hold against them."""

from lipformer.certificate import _activations, _linear_rules, _torch_rules  # noqa: F401  rules
from lipformer.certificate._attack import Attack, attack_lipschitz
from lipformer.certificate._certificate import Certificate, NotCertifiable
from lipformer.certificate._estimate import Estimate, estimate_lipschitz
from lipformer.certificate._linear_rules import conv_bound
from lipformer.certificate._registry import (
    Ask,
    Bound,
    certify,
    register_bound,
    times,
    weighted_sum,
)

__all__ = [
    "Ask",
    "Attack",
    "Bound",
    "Certificate",
    "Estimate",
    "NotCertifiable",
    "attack_lipschitz",
    "certify",
    "conv_bound",
    "estimate_lipschitz",
    "register_bound",
    "times",
    "weighted_sum",
]
