"""Layouts of tokens and padding masks, to and from (B, N, D)."""

from __future__ import annotations

from torch import Tensor

from lipformer.functional.attention.checks import as_padding, check_tokens


def batched(x: Tensor, width: int, batch_first: bool) -> Tensor:
    """Tokens (B, N, D), (N, B, D) or (N, D) as (B, N, D)."""
    form = "(B, N, D)" if batch_first else "(N, B, D)"
    check_tokens(x, "query", f"{form} or (N, D)", min_dim=2)
    if x.ndim > 3 or x.shape[-1] != width:
        raise ValueError(f"query must have shape {form} or (N, D) with D={width}, got {tuple(x.shape)}")
    if x.ndim == 2:
        return x.unsqueeze(0)
    return x if batch_first else x.transpose(0, 1)


def unbatched(out: Tensor, like: Tensor, batch_first: bool) -> Tensor:
    """Tokens (B, N, D) in the layout of ``like``."""
    if like.ndim == 2:
        return out.squeeze(0)
    return out if batch_first else out.transpose(0, 1)


def padding(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """A key padding mask (B, N) or (N,) for tokens (B, N, D) as bool (B, N)."""
    if isinstance(mask, Tensor) and mask.ndim == 1 and x.shape[0] == 1:
        mask = mask.unsqueeze(0)
    return as_padding(mask, x.unsqueeze(1))


def without_padding(tokens: Tensor, padding: Tensor | None) -> Tensor:
    """Tokens (*, B, T, D) with zeros where ``padding`` (B, T) is True."""
    return tokens if padding is None else tokens.masked_fill(padding.unsqueeze(-1), 0.0)
