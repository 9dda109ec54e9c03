"""Invertible blocks as transforms of other flow libraries, which are imported only when asked for."""

from lipformer.flows.adapters.hosts import to_freia, to_nflows, to_normflows, to_pyro, to_zuko
from lipformer.flows.adapters.torch_transform import to_torch_transform

__all__ = [
    "to_freia",
    "to_nflows",
    "to_normflows",
    "to_pyro",
    "to_torch_transform",
    "to_zuko",
]
