"""Slow, plain float64 references that every test compares the package with.

Nothing here is fast, fused or clever, and nothing here imports lipformer: each function
writes down a definition so that a reader can check it by eye.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# ---------------------------------------------------------------------------------------
# L2 attention
# ---------------------------------------------------------------------------------------


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """||a_i - b_j||^2 from the differences themselves: (*, N, d), (*, M, d) -> (*, N, M)."""
    return (a[..., :, None, :] - b[..., None, :, :]).square().sum(-1)


def visible_keys(n: int, is_causal: bool = False, window: int | None = None) -> Tensor:
    """(n, n) boolean, True where query i (row) may see key j (column)."""
    i = torch.arange(n)[:, None]
    j = torch.arange(n)[None, :]
    seen = torch.ones(n, n, dtype=torch.bool)
    if is_causal:
        seen = seen & (j <= i)
    if window is not None:
        assert is_causal, "a window needs is_causal"
        seen = seen & (i - j < window)
    return seen


def l2_attention_oracle(
    y: Tensor,
    is_causal: bool = False,
    window: int | None = None,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    scale: float | Tensor | None = None,
) -> Tensor:
    """P(y) y with P = softmax over keys of -scale ||y_i - y_j||^2 + bias, in float64.

    Args:
        y: (*, H, N, d), query, key and value at once.
        is_causal: Query i sees the keys j <= i.
        window: Query i sees the keys i - window < j <= i.
        slopes: (H,), adds -slope_h (i - j).
        bias: Broadcastable to (*, H, N, N), added to the logits; -inf hides a key.
        key_padding_mask: (*, N) boolean, True hides the key; padded queries give zero rows.
        scale: Float or (H, 1, 1), d**-0.5 by default.
    """
    y = y.double()
    n, d = y.shape[-2:]
    if scale is None:
        scale = d**-0.5
    if isinstance(scale, Tensor):
        scale = scale.double()
    logits = -scale * squared_distances(y, y)
    if slopes is not None:
        assert is_causal, "slopes need is_causal"
        position = torch.arange(n, dtype=y.dtype)
        logits = logits - slopes.double()[:, None, None] * (position[:, None] - position[None, :])
    if bias is not None:
        logits = logits + bias.double()
    hidden = ~visible_keys(n, is_causal, window)
    if key_padding_mask is None:
        return torch.softmax(logits.masked_fill(hidden, -math.inf), dim=-1) @ y
    padded = key_padding_mask[..., None, :]  # (*, 1, N): the same for every head
    hidden = hidden | padded[..., None, :]
    # A padded query might see no key at all: it gets its own, so that no NaN arises, then zero.
    hidden = hidden & ~(padded[..., :, None] & torch.eye(n, dtype=torch.bool))
    p = torch.softmax(logits.masked_fill(hidden, -math.inf), dim=-1)
    return torch.where(padded[..., :, None], 0.0, p @ y)


# ---------------------------------------------------------------------------------------
# Negative controls: attention that looks like L2 attention and has no Lipschitz constant.
# x is (*, N, D), the weights are (D, d); all return softmax(logits) @ values.
# ---------------------------------------------------------------------------------------


def tied_attention(x: Tensor, w: Tensor, scale: float = 1.0) -> Tensor:
    """The correct form, one head, lean: y = x w is query, key and value at once."""
    y = x @ w
    return torch.softmax(-scale * squared_distances(y, y), dim=-1) @ y


def untied_attention(x: Tensor, w_q: Tensor, w_k: Tensor, scale: float = 1.0) -> Tensor:
    """Broken: queries x w_q and keys x w_k come from different weights."""
    q, k = x @ w_q, x @ w_k
    return torch.softmax(-scale * squared_distances(q, k), dim=-1) @ k


def free_values_attention(x: Tensor, w: Tensor, scale: float = 1.0) -> Tensor:
    """Broken for d < D: the values are x itself (no A_h), also where w sees nothing."""
    y = x @ w
    return torch.softmax(-scale * squared_distances(y, y), dim=-1) @ x


def own_key_masked_attention(x: Tensor, w: Tensor, scale: float = 1.0) -> Tensor:
    """Broken: a token may look at every token but itself."""
    y = x @ w
    own = torch.eye(x.shape[-2], dtype=torch.bool)
    logits = (-scale * squared_distances(y, y)).masked_fill(own, -math.inf)
    return torch.softmax(logits, dim=-1) @ y


def _distances(y: Tensor) -> Tensor:
    """||y_i - y_j|| with the gradient 0, not NaN, on the diagonal."""
    squared = squared_distances(y, y)
    own = torch.eye(y.shape[-2], dtype=torch.bool)
    return squared.masked_fill(own, 1.0).sqrt().masked_fill(own, 0.0)


def unsquared_attention(x: Tensor, w: Tensor, scale: float = 1.0) -> Tensor:
    """exp(-scale ||y_i - y_j||), else the correct form: a different layer, yet still bounded."""
    y = x @ w
    return torch.softmax(-scale * _distances(y), dim=-1) @ y


def unsquared_free_values_attention(x: Tensor, w: Tensor, scale: float = 1.0) -> Tensor:
    """Broken for d < D: unsquared distance and values x, as public code has it."""
    return torch.softmax(-scale * _distances(x @ w), dim=-1) @ x


def positive_sign_attention(x: Tensor, w: Tensor, scale: float = 1.0) -> Tensor:
    """Broken: the sign of the distance is not negated, a token looks at the farthest one."""
    y = x @ w
    return torch.softmax(scale * squared_distances(y, y), dim=-1) @ y


# ---------------------------------------------------------------------------------------
# Jacobians and their gains
# ---------------------------------------------------------------------------------------


def dense_jacobian(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """(M, K): one row for each of fn(x)'s M entries, one column for each of x's K entries."""
    jacobian = torch.autograd.functional.jacobian(fn, x)
    assert isinstance(jacobian, Tensor)
    return jacobian.reshape(-1, x.numel()).detach()


def gains(jacobian: Tensor, n: int, d: int) -> dict[str, float]:
    """The operator norms of a dense (n d, n d) Jacobian of n tokens of width d.

    l2: largest singular value. linf: largest absolute row sum. self: largest ||J_ii||.
    token: max_i sup_{|a|=1} sum_j |J_ij^T a|, see `token_gain`.
    """
    blocks = jacobian.reshape(n, d, n, d).permute(0, 2, 1, 3)  # (i, j, d, d)
    own = torch.stack([blocks[i, i] for i in range(n)])
    return {
        "l2": torch.linalg.matrix_norm(jacobian, 2).item(),
        "linf": jacobian.abs().sum(dim=1).max().item(),
        "self": torch.linalg.matrix_norm(own, 2).max().item(),
        "token": max(token_gain(blocks[i]) for i in range(n)),
    }


def token_gain(row: Tensor, samples: int = 2048, rounds: int = 100) -> float:
    """sup_{|a|=1} sum_j |B_j^T a| for row = (J, d, e), the blocks B_j of one output token.

    By trying many a (all angles for d = 2), then climbing from each of the best 32: for
    e_j = B_j^T a / |B_j^T a| the vector sum_j B_j e_j, normalised, is never worse than a.
    """
    d = row.shape[1]
    if d == 1:
        return row.abs().square().sum(-1).sqrt().sum().item()
    if d == 2:
        angle = torch.linspace(0, math.pi, samples, dtype=row.dtype)
        a = torch.stack([angle.cos(), angle.sin()], dim=-1)
    else:
        generator = torch.Generator().manual_seed(0)
        a = torch.randn(samples, d, dtype=row.dtype, generator=generator)
    a = a / a.norm(dim=-1, keepdim=True)
    tiny = torch.finfo(row.dtype).tiny

    def value(a: Tensor) -> tuple[Tensor, Tensor]:
        pulled = torch.einsum("jde,sd->sje", row, a)
        lengths = pulled.norm(dim=-1)
        return lengths.sum(-1), pulled / lengths.clamp_min(tiny)[..., None]

    a = a[value(a)[0].topk(min(32, len(a))).indices]
    for _ in range(rounds):
        a = torch.einsum("jde,sje->sd", row, value(a)[1])
        a = a / a.norm(dim=-1, keepdim=True).clamp_min(tiny)
    return value(a)[0].max().item()
