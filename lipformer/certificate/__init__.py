"""Certified upper bounds on Lipschitz constants: rules for modules, and how they compose."""

from lipformer.certificate import (  # noqa: F401  rules
    activations,
    linear_rules,
    pooling_rules,
    torch_rules,
    wrappers,
)
from lipformer.certificate.asking import certify
from lipformer.certificate.bounds import (
    Ask,
    Bound,
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
