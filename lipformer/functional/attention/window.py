"""Sliding-window attention in blocks, without an N x N tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 64


def window_attention(
    query: Tensor, key: Tensor, window: int, norm: int, hidden: float, dropout_p: float
) -> Tensor:
    """Attention of each query over its ``window`` latest keys, itself included.

    Queries are cut into blocks of c = max(window, 64); a block sees c + window - 1 keys, so time and
    memory grow like N (c + window) and not like N^2.

    Args:
        query: augmented queries (B, H, N, E).
        key: augmented keys, which are the values too (B, H, N, E).
        window: number of latest keys kept.
        norm: the key column that holds the norms.
        hidden: the entry of that column that hides a key.
        dropout_p: dropout probability.

    Returns:
        (B, H, N, E).
    """
    batch, heads, n, width = query.shape
    block = max(window, _BLOCK)
    blocks = n // block + 1
    tail = blocks * block - n
    # Keys that do not exist are zero tokens with the norm of a padded one.
    before = key.new_zeros(batch, heads, window - 1, width)
    before[..., norm] = hidden
    key = torch.cat([before, F.pad(key, (0, 0, 0, tail))], dim=-2)
    span = block + window - 1
    keys = key.unfold(-2, span, block).transpose(-1, -2).reshape(batch, heads * blocks, span, width)
    queries = F.pad(query, (0, 0, 0, tail)).reshape(batch, heads * blocks, block, width)
    row = torch.arange(block, device=query.device)[:, None]
    column = torch.arange(span, device=query.device)
    visible = (column >= row) & (column < row + window)
    out = F.scaled_dot_product_attention(
        queries, keys, keys, attn_mask=visible, dropout_p=dropout_p, scale=1.0
    )
    return out.reshape(batch, heads, blocks * block, width)[..., :n, :]
