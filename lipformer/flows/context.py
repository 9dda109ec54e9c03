"""What a flow makes of a context: one vector for each event, and an affine map that depends on it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.flows.linear import keep_padded
from lipformer.functional.rounding import ROUND_UP
from lipformer.layers.branch import check_context
from lipformer.layers.layout import padding, without_padding


class ContextEncoder(nn.Module):
    r"""A context of tokens (B, S, C) as one vector (B, E), by attention pooling.

    .. math:: h_s = \mathrm{SiLU}(A c_s + a), \qquad
       e_k = \sum_s \operatorname{softmax}_s(K h_s)_k \, (V h_s)_k

    Every feature k of the vector has weights of its own over the tokens, equal ones to begin with. The
    order of the tokens does not count: give them positions if it should. Nothing here depends on the
    events, so nothing is bounded.

    Args:
        context_dim: C.
        width: E.

    Example:
        >>> encoder = ContextEncoder(3, 8)
        >>> encoder(torch.randn(2, 5, 3)).shape
        torch.Size([2, 8])
    """

    def __init__(self, context_dim: int, width: int) -> None:
        super().__init__()
        self.context_dim = context_dim
        self.width = width
        self.features = nn.Linear(context_dim, width)
        self.scores = nn.Linear(width, width, bias=False)
        self.values = nn.Linear(width, width)
        nn.init.zeros_(self.scores.weight)

    def forward(self, context: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """(B, S, C) -> (B, E).

        Args:
            context: (B, S, C).
            key_padding_mask: (B, S), True (or -inf) at padded tokens; with no others left all weights
                are zero.
        """
        padded = padding(key_padding_mask, context)
        # Under autocast samples and densities would be those of rounded contexts.
        with torch.autocast(context.device.type, enabled=False):
            tokens = without_padding(context.to(self.features.weight.dtype), padded)
            features = F.silu(self.features(tokens))
            scores = self.scores(features)
            if padded is not None:
                scores = scores.masked_fill(padded.unsqueeze(-1), -torch.inf)
            weights = without_padding(scores.softmax(-2), padded)
            return (weights * self.values(features)).sum(-2)

    def extra_repr(self) -> str:
        return f"{self.context_dim}, {self.width}"


Context = Tensor | tuple[Tensor, Tensor] | None
"""Vectors (B, C), tokens (B, S, C), or tokens and their padding mask (B, S)."""


def encode_context(
    context: Context, x: Tensor, context_dim: int | None, encoder: nn.Module | None
) -> Tensor | None:
    """The vectors (B, E) that the blocks of a flow get for a context.

    Args:
        context: vectors (B, C), tokens (B, S, C), or tokens with their padding mask (B, S) as a pair. A
            batch of one, or a vector (C,), is the context of all events.
        x: the events (B, T, D).
        context_dim: C, or None for a flow that takes no context.
        encoder: makes vectors of tokens, a vector being one token. None: vectors are passed on.

    Raises:
        ValueError: of another shape or dtype, missing, or given to a flow that takes none.
    """
    tokens, mask = context if isinstance(context, tuple) else (context, None)
    got = f"{tuple(tokens.shape)}" if isinstance(tokens, Tensor) else f"{tokens!r}"
    if context_dim is None:
        if context is not None:
            raise ValueError(
                f"the flow takes no context, got {got}: build it with context_dim=C (AttentionFlow), or "
                "of blocks that take one"
            )
        return None
    if (
        not isinstance(tokens, Tensor)
        or tokens.ndim not in ((1, 2) if encoder is None else (1, 2, 3))
        or tokens.shape[-1] != context_dim
        or (tokens.ndim > 1 and tokens.shape[0] not in (1, x.shape[0]))
        or (mask is not None and tokens.ndim != 3)
    ):
        forms = f"({context_dim},), (B, {context_dim})"
        if encoder is not None:
            forms += f", (B, S, {context_dim}) or the pair of these and a mask (B, S)"
        raise ValueError(
            f"the flow takes a context {forms}, with B = 1 or that of the events {tuple(x.shape)}, got "
            f"{got}{': give it by name, context=c' if context is None else ''}"
        )
    if tokens.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"the context must be {x.dtype} as the events are, got {tokens.dtype}")
    tokens = tokens.unsqueeze(0) if tokens.ndim == 1 else tokens
    if encoder is not None:
        tokens = encoder(tokens.unsqueeze(1) if tokens.ndim == 2 else tokens, mask)
    return tokens.expand(x.shape[0], -1)


class ContextAffine(nn.Module):
    r""":math:`y = (x + b(c))\,e^{s(c)}` for each feature, with b and s linear in a context c.

    :math:`s = r \tanh(\tilde s / r)` with the limit r, so that no context can make the map flat or
    steep without end. It starts as the identity. :math:`\log|\det J| = T \sum_k s_k(c)` with T the
    unpadded tokens of a sample. For every context the map has an inverse, and constant at most
    :math:`e^r`.

    Args:
        dim: D, the number of features.
        context_dim: C, the number of features of a context.
        limit: r.

    Example:
        >>> layer = ContextAffine(4, 3)
        >>> x, c = torch.randn(2, 5, 4), torch.randn(2, 3)
        >>> y, log_det = layer.forward_and_log_det(x, context=c)
        >>> torch.equal(layer.inverse(y, context=c), x), log_det.shape
        (True, torch.Size([2]))
    """

    # For step_module and own-token blocks: nothing of other tokens is looked at.
    token_wise = True

    def __init__(self, dim: int, context_dim: int, limit: float = 2.0) -> None:
        super().__init__()
        if not 0.0 < limit < math.inf:
            raise ValueError(f"limit must be positive and finite, got {limit!r}")
        self.dim = dim
        self.context_dim = context_dim
        self.limit = float(limit)
        self.linear = nn.Linear(context_dim, 2 * dim)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        """(B, T, D) with contexts (B, C) -> (B, T, D)."""
        return self.forward_and_log_det(x, key_padding_mask, context)[0]

    def inverse(
        self, y: Tensor, key_padding_mask: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        """The inverse, exact up to rounding: (B, T, D) -> (B, T, D)."""
        return self.inverse_and_log_det(y, key_padding_mask, context)[0]

    def forward_and_log_det(
        self, x: Tensor, key_padding_mask: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The output (B, T, D) and log|det| per sample (B,)."""
        padded, shift, log_scale = self._maps(x, key_padding_mask, context)
        y = ((without_padding(x, padded) + shift) * log_scale.exp()).to(x.dtype)
        return keep_padded(padded, x, y), _of_tokens(log_scale, x, padded)

    def inverse_and_log_det(
        self, y: Tensor, key_padding_mask: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The input (B, T, D) and log|det| of the inverse per sample (B,)."""
        padded, shift, log_scale = self._maps(y, key_padding_mask, context)
        x = (without_padding(y, padded) * (-log_scale).exp() - shift).to(y.dtype)
        return keep_padded(padded, y, x), -_of_tokens(log_scale, y, padded)

    def _maps(
        self, x: Tensor, key_padding_mask: Tensor | None, context: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """The padding as bool (B, T), b and s (B, 1, D)."""
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"the input must be (B, T, D) with D={self.dim}, got {tuple(x.shape)}")
        check_context(self, context, x)
        assert context is not None
        # Under autocast the map and its determinant would be rounded.
        with torch.autocast(x.device.type, enabled=False):
            both = self.linear(context.to(self.linear.weight.dtype)).unsqueeze(-2)
            shift, raw = both.chunk(2, dim=-1)
            log_scale = self.limit * torch.tanh(raw / self.limit)
        return padding(key_padding_mask, x), shift, log_scale

    def extra_repr(self) -> str:
        return f"{self.dim}, {self.context_dim}, limit={self.limit}"


def _of_tokens(log_scale: Tensor, x: Tensor, padded: Tensor | None) -> Tensor:
    """The sum of s (B, 1, D) over the unpadded tokens of x (B, T, D) and their features, (B,)."""
    one = log_scale.sum((-2, -1)).to(torch.promote_types(x.dtype, torch.float32))
    return one * (x.shape[1] if padded is None else (~padded).sum(-1))


@register_bound(ContextAffine)
def _(module: ContextAffine, ask: Ask) -> Bound:
    # |tanh| <= 1 also as computed; exp and the product with the limit are off by an ulp or so.
    rounding = 1.0 + 8.0 * max(1.0, module.limit) * torch.finfo(module.linear.weight.dtype).eps
    return Bound(math.exp(module.limit) * rounding * ROUND_UP, f"exp({module.limit:g}), any context")
