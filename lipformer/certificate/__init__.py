"""Certified upper bounds of Lipschitz constants: rules for modules, and how they compose."""

from lipformer.certificate import activations, linear_rules, torch_rules  # noqa: F401  rules
from lipformer.certificate.bounds import (
    Ask,
    Bound,
    certify,
    register_bound,
    times,
    weighted_sum,
)
from lipformer.certificate.certificate import Certificate, NotCertifiable
from lipformer.certificate.linear_rules import conv_bound

__all__ = [
    "Ask",
    "Bound",
    "Certificate",
    "NotCertifiable",
    "certify",
    "conv_bound",
    "register_bound",
    "times",
    "weighted_sum",
]
