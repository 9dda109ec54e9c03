"""Invertible blocks, their log-determinants, and normalising flows made of them.

Start with :class:`AttentionFlow`, a density of sets or sequences (B, T, D): ``log_prob``, ``sample``. It
is a :class:`Flow` of :class:`InvertibleResidual`, :class:`ActNorm`, :class:`InvertibleLinear` and
:class:`Permutation` (if equivariant, :class:`MeanFreeScale`), which all have ``forward``, ``inverse``,
``forward_and_log_det`` and ``inverse_and_log_det``, and so has :class:`InvertibleSequential`, a stack of
them. ``to_*`` put them into other flow libraries. See docs/flows.md.
"""

from lipformer.flows.act_norm import ActNorm
from lipformer.flows.adapters import (
    to_freia,
    to_nflows,
    to_normflows,
    to_pyro,
    to_torch_transform,
    to_zuko,
)
from lipformer.flows.attention_flow import AttentionFlow
from lipformer.flows.composition import Flow, InvertibleSequential
from lipformer.flows.context import ContextAffine, ContextEncoder
from lipformer.flows.invertible_residual import InvertibleResidual
from lipformer.flows.linear import InvertibleLinear, Permutation
from lipformer.flows.log_det.exact import supports_causal
from lipformer.flows.log_det.methods import LogDet, residual_log_det
from lipformer.flows.mean_free import MeanFreeNormal, MeanFreeScale
from lipformer.flows.solve.conditioning import estimate_inverse_gain
from lipformer.flows.solve.fixed_point import NotConverged, Record, solve_fixed_point

__all__ = [
    "ActNorm",
    "AttentionFlow",
    "ContextAffine",
    "ContextEncoder",
    "Flow",
    "InvertibleLinear",
    "InvertibleResidual",
    "InvertibleSequential",
    "LogDet",
    "MeanFreeNormal",
    "MeanFreeScale",
    "NotConverged",
    "Permutation",
    "Record",
    "estimate_inverse_gain",
    "residual_log_det",
    "solve_fixed_point",
    "supports_causal",
    "to_freia",
    "to_nflows",
    "to_normflows",
    "to_pyro",
    "to_torch_transform",
    "to_zuko",
]
