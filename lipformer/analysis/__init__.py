"""How smooth is attention? Local bounds and gains of dot-product attention.

Dot-product attention has no finite Lipschitz constant. This package bounds it on a ball or around one
input, measures its local gain in real models, and propagates perturbations through a network.
"""

from lipformer.analysis.bounds.adversarial import (
    adversarial_measure,
    adversarial_tokens,
    ball_lower_bound,
    mean_field_lower_bound,
)
from lipformer.analysis.bounds.ball import ball_bound, layer_norm_radius, mean_field_bound
from lipformer.analysis.bounds.local import jasmin_loss, local_bound
from lipformer.analysis.maps import attention_maps
from lipformer.analysis.measures import (
    SplitAttack,
    measure_attention,
    measure_gain,
    measure_gain_estimate,
    split_attack,
    split_gain,
)
from lipformer.analysis.probes.gain_table import Exponent, GainRow, GainTable
from lipformer.analysis.probes.gains import layer_gains
from lipformer.analysis.probes.probe import AttentionProbe, probe_attention
from lipformer.analysis.robustness import certify_at  # noqa: F401  what certify(at=) answers by
from lipformer.analysis.robustness.lofast import lofast_bound
from lipformer.analysis.robustness.perturbation import perturbation_bound, register_perturbation
from lipformer.analysis.robustness.radius import certified_accuracy, certified_radius, is_certified
from lipformer.functional.attention.maps import AttentionMaps

__all__ = [
    "AttentionMaps",
    "AttentionProbe",
    "Exponent",
    "GainRow",
    "GainTable",
    "SplitAttack",
    "adversarial_measure",
    "adversarial_tokens",
    "attention_maps",
    "ball_bound",
    "ball_lower_bound",
    "certified_accuracy",
    "certified_radius",
    "is_certified",
    "jasmin_loss",
    "layer_gains",
    "layer_norm_radius",
    "local_bound",
    "lofast_bound",
    "mean_field_bound",
    "mean_field_lower_bound",
    "measure_attention",
    "measure_gain",
    "measure_gain_estimate",
    "perturbation_bound",
    "probe_attention",
    "register_perturbation",
    "split_attack",
    "split_gain",
]
