"""L2 attention with plain weights."""

from __future__ import annotations

import copy

from einops import rearrange
from torch import Tensor, nn

from lipformer.layers._bake import plain_linear, register_bake
from lipformer.layers._l2_multihead_attention import L2MultiheadAttention


def bake_attention(
    layer: L2MultiheadAttention, head_scale: Tensor | None = None, bias_scale: Tensor | None = None
) -> L2MultiheadAttention:
    """The layer in the lean form with plain weights, the factors in its output weights."""
    layer = copy.deepcopy(layer)
    matrix = layer.output_matrix()
    if head_scale is not None:
        matrix = matrix * head_scale[:, None, None].to(matrix.dtype)
    out = plain_linear(layer.out_proj)
    out.weight.copy_(rearrange(matrix, "h d o -> o (h d)"))
    if out.bias is not None and bias_scale is not None:
        out.bias.mul_(bias_scale.to(out.bias.dtype))
    if layer.log_temperature is None:
        start = out.weight.new_full((layer.num_heads,), layer.head_dim**-0.5).log()
        layer.log_temperature = nn.Parameter(start)
    layer.q_proj, layer.out_proj, layer.v_proj = plain_linear(layer.q_proj), out, None
    layer.proj_coeff = None
    return layer


register_bake(L2MultiheadAttention)(bake_attention)
