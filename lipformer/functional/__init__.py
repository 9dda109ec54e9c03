"""The mathematics as free functions."""

from lipformer.functional._checks import debug_checks
from lipformer.functional._gain import l2_gain
from lipformer.functional._gain_row import row_spread
from lipformer.functional._l2_attention import l2_attention, l2_attention_step
from lipformer.functional._lambertw import lambert_w0
from lipformer.functional._spectral import spectral_norm_bound
from lipformer.functional._weights import l2_attention_weights

__all__ = [
    "debug_checks",
    "l2_attention",
    "l2_attention_step",
    "l2_attention_weights",
    "l2_gain",
    "lambert_w0",
    "row_spread",
    "spectral_norm_bound",
]
