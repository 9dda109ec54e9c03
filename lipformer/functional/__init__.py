"""The mathematics as free functions."""

from lipformer.functional.attention.fused import l2_attention, l2_attention_step
from lipformer.functional.attention.null_key import null_key_attention
from lipformer.functional.attention.weights import l2_attention_weights
from lipformer.functional.gain.lambertw import lambert_w0
from lipformer.functional.gain.minimum import l2_gain
from lipformer.functional.gain.rows import row_spread
from lipformer.functional.spectral.bound import spectral_norm_bound
from lipformer.functional.tracing import debug_checks

__all__ = [
    "debug_checks",
    "l2_attention",
    "l2_attention_step",
    "l2_attention_weights",
    "l2_gain",
    "lambert_w0",
    "null_key_attention",
    "row_spread",
    "spectral_norm_bound",
]
