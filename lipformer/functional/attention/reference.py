r"""A reference point for L2 attention, so that a common offset of the tokens cannot hurt.

The fused form expands :math:`\|z_i-z_j\|^2` and so cancels badly when all tokens lie far from the
origin. Since :math:`P(Y+c)(Y+c) = P(Y)Y + c`, any point :math:`c` may be subtracted first and added
back. It must lie among the tokens even when one of them is far away, hence a coordinate-wise median
of a few tokens: of the first ones in causal attention (later tokens cannot change it), of evenly
spread ones otherwise. It is detached: the Jacobian does not depend on it.

In causal attention the rows before the last sampled token would still see later tokens through the
rounding of ``c``. There are at most four of them, so they are computed directly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SAMPLES = 5


def sample_positions(padding: Tensor, count: int, *, spread: bool) -> Tensor:
    """Positions of ``count`` valid tokens: the first ones, or evenly spread ones.

    Args:
        padding: (*, N) bool, True at padded tokens.
        count: how many positions; where fewer tokens are valid, the last valid one is repeated.
        spread: evenly spread over the valid tokens rather than the first ones.

    Returns:
        (*, count) int64. Where no token is valid at all, position 0.
    """
    valid = ~padding
    rank = valid.long().cumsum(-1)
    total = rank[..., -1:]
    k = torch.arange(count, device=padding.device).expand(*padding.shape[:-1], count)
    wanted = (k * total) // count if spread else k
    wanted = torch.minimum(wanted, (total - 1).clamp_min(0)) + 1
    # The position of the r-th valid token is the number of positions of rank below r.
    return (rank.unsqueeze(-2) < wanted.unsqueeze(-1)).sum(-1).clamp_max(padding.shape[-1] - 1)


def gather_tokens(y: Tensor, positions: Tensor) -> Tensor:
    """Tokens (*, H, k, d) of ``y`` (*, H, N, d) at ``positions`` (*, k)."""
    index = positions[..., None, :, None].expand(*y.shape[:-2], positions.shape[-1], y.shape[-1])
    return y.gather(-2, index)


def reference_point(y: Tensor, padding: Tensor | None, *, is_causal: bool) -> Tensor:
    """Coordinate-wise median of up to five valid tokens, detached.

    Args:
        y: (*, H, N, d).
        padding: (*, N) bool, True at padded tokens, or None.
        is_causal: sample the first tokens rather than evenly spread ones.

    Returns:
        (*, H, 1, d), in y's dtype.
    """
    y = y.detach()
    if padding is not None:
        sample = gather_tokens(y, sample_positions(padding, SAMPLES, spread=not is_causal))
    else:
        n = y.shape[-2]
        if is_causal and n >= SAMPLES:
            sample = y[..., :SAMPLES, :]
        else:
            k = torch.arange(SAMPLES, device=y.device)
            sample = y.index_select(-2, k.clamp_max(n - 1) if is_causal else k * n // SAMPLES)
    return sample.sort(dim=-2).values[..., SAMPLES // 2 : SAMPLES // 2 + 1, :]


def first_rows(
    y: Tensor,
    *,
    scale: float | Tensor,
    slopes: Tensor | None,
    bias: Tensor | None,
    padding: Tensor | None,
    window: int | None,
    dropout_p: float,
) -> Tensor:
    r"""The rows of the first few valid tokens of causal L2 attention, by differences.

    .. math:: g_i = y_i + \sum_{j \le i} P_{ij} (y_j - y_i)

    Args:
        y: (*, H, N, d).
        scale: temperature, float or broadcastable to (H, 1, 1).
        slopes: ALiBi slopes (H,) or None.
        bias: broadcastable to (*, H, N, N), or None.
        padding: (*, N) bool or None.
        window: number of latest keys kept, or None.
        dropout_p: probability of dropping an attention weight.

    Returns:
        (*, H, k, d) with k = min(5, N) - 1, in at least float32.
    """
    count = min(SAMPLES, y.shape[-2]) - 1
    place = torch.arange(count, device=y.device)
    hidden = place[:, None] < place
    if padding is None:
        tokens = y[..., :count, :]
    else:
        positions = sample_positions(padding, count, spread=False)
        tokens = gather_tokens(y, positions)
        # A position repeated for want of valid tokens must not count as one more key.
        real = place < (~padding).sum(-1, keepdim=True).clamp_min(1)
        hidden = (hidden | ~real.unsqueeze(-2)).unsqueeze(-3)
        place = positions.unsqueeze(-2)
    lag = place.unsqueeze(-1) - place.unsqueeze(-2)
    if window is not None:
        hidden = hidden | (lag >= window)
    tokens = tokens.to(torch.promote_types(y.dtype, torch.float32))
    difference = tokens.unsqueeze(-3) - tokens.unsqueeze(-2)
    logits = -scale * difference.square().sum(-1)
    if slopes is not None:
        logits = logits - slopes.to(tokens.dtype)[:, None, None] * lag
    if bias is not None:
        bias = bias.expand(*y.shape[:-1], y.shape[-2])
        if padding is None:
            logits = logits + bias[..., :count, :count]
        else:
            row = positions[..., None, :, None].expand(*y.shape[:-2], count, y.shape[-2])
            column = positions[..., None, None, :].expand(*y.shape[:-2], count, count)
            logits = logits + bias.gather(-2, row).gather(-1, column)
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    if dropout_p > 0.0:
        weights = F.dropout(weights, dropout_p)
        tokens = weights.sum(-1, keepdim=True) * tokens
    # difference[i, j] is y_j - y_i.
    return tokens + (weights.unsqueeze(-1) * difference).sum(-2)


def replace_first_rows(rows: Tensor, exact: Tensor, padding: Tensor | None, skipped: int = 0) -> Tensor:
    """Puts the rows of :func:`first_rows` in the place of the fused ones.

    Args:
        rows: the last N - skipped rows (*, H, N - skipped, d).
        exact: rows of the first valid tokens (*, H, k, d).
        padding: (*, N) bool or None.
        skipped: number of tokens whose rows are not asked for.
    """
    count = exact.shape[-2]
    if count == 0 or (padding is None and skipped >= count):
        return rows
    if padding is None:
        # In place: rows is a result of its own, and a second copy of it would cost time.
        rows[..., : count - skipped, :] = exact[..., skipped:, :]
        return rows
    positions = sample_positions(padding, count, spread=False)
    # Rows that are not asked for go to one more slot in front, which is dropped; so do positions
    # repeated for want of valid tokens, or each would get the whole gradient of the row.
    rank = torch.arange(count, device=rows.device)
    repeated = rank >= (~padding).sum(-1, keepdim=True)
    slot = (positions - skipped + 1).masked_fill(repeated, 0).clamp_min(0)
    index = slot[..., None, :, None].expand(exact.shape)
    return F.pad(rows, (0, 0, 1, 0)).scatter(-2, index, exact)[..., 1:, :]
