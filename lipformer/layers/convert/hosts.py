"""L2 attention behind the signatures by which other libraries call their own attention.

A host keeps calling what stands in the place of its attention as before. A mask that hides padded keys,
and later ones where the host is causal, becomes a padding mask; any other needs ``any_mask=True``, whose
certificate covers it. What a host asks for beyond that raises ValueError.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.certificate.bounds import times
from lipformer.functional.tracing import values_readable
from lipformer.layers.attention.key_cache import KeyCache
from lipformer.layers.attention.multihead import L2MultiheadAttention
from lipformer.layers.attention.null_key import NullKeyAttention
from lipformer.layers.layer import Layer


class Visible(NamedTuple):
    """Which keys a host shows to which queries.

    Attributes:
        keys: (b, h, T, S) bool, of the last T of S tokens; b and h may be one.
        known: a bool scalar, whether the mask said nothing else than that.
    """

    keys: Tensor
    known: Tensor


def visible(mask: Tensor, queries: int) -> Visible:
    """A mask of scaled_dot_product_attention: bool, True at visible keys, or 0 and -inf to add.

    Args:
        mask: (T, S), (h, T, S) or (b, h, T, S); T may be one for all. Of floats, half the lowest number
            is -inf already.
        queries: T.
    """
    if not isinstance(mask, Tensor) or not 2 <= mask.ndim <= 4:
        given = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"a mask must be a tensor of 2 to 4 dimensions, got {given}")
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape)).expand(-1, -1, queries, -1)
    if not mask.is_floating_point():
        return Visible(mask.bool(), torch.ones((), dtype=torch.bool, device=mask.device))
    hidden = mask < torch.finfo(mask.dtype).min / 2
    return Visible(~hidden, (hidden | (mask == 0)).all())


def padding_of(shown: Visible, causal: bool) -> tuple[Tensor, Tensor]:
    """The padding (b, S) of a mask, and whether that, and causality, is all it says.

    The last token sees every key that is not padded, and no token sees one that is. What padded queries
    see of the others does not count.
    """
    queries, keys = shown.keys.shape[-2:]
    valid = shown.keys[:, 0, -1]
    columns, rows = valid[:, None, None, :], valid[:, None, keys - queries :, None]
    expected = columns
    if causal:
        before = torch.ones(queries, keys, dtype=torch.bool, device=valid.device).tril(keys - queries)
        expected = columns & before
    same = (shown.keys == expected) | (~rows & ~shown.keys) | (~rows & columns)
    return ~valid, shown.known & same.all()


def hidden_of(shown: Visible) -> tuple[Tensor, Tensor, Tensor]:
    """The padding (b, N) of any mask, the keys (b, h, N, N) that it hides besides, and whether it fits.

    A token that does not see itself is padded: then no other may see it.
    """
    own = torch.diagonal(shown.keys, dim1=-2, dim2=-1).all(1)  # (b, N)
    rows, columns = own[:, None, :, None], own[:, None, None, :]
    fits = shown.known & ~(shown.keys & rows & ~columns).any()
    return ~own, ~shown.keys & rows & columns, fits


class HostedAttention(Layer):
    """L2 attention in the place of another library's.

    Attributes:
        attention: batch first.
        after: the dropout that the host's attention ends with.
        is_causal: whether the host's attention is; None if each call says so.
        layer_idx: which layer of a cache is its.
    """

    def __init__(
        self,
        attention: L2MultiheadAttention | NullKeyAttention,
        is_causal: bool | None,
        after: nn.Module | None = None,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.after = nn.Identity() if after is None else after
        self.is_causal = is_causal
        self.layer_idx = layer_idx

    def _attend(
        self, x: Tensor, padding: Tensor | None, mask: Tensor | None, causal: bool, past: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The rows of new tokens x (B, T, D), and with a past their keys (B, H, T, d).

        Args:
            x: new tokens.
            padding: (B, S) of all tokens, True at padded ones, or None.
            mask: as in :func:`visible`, or None.
            causal: whether later keys are hidden, by the mask or without one.
            past: keys of earlier tokens (B, H, S - T, d), none at first; None without a cache.
        """
        attn_mask: Tensor | None = None
        sure: Tensor | None = None
        first = past is None or not past.shape[-2]
        if mask is not None:
            shown = visible(mask, x.shape[1])
            found, fits = padding_of(shown, causal)
            readable = values_readable(fits)
            if self.attention.any_mask and first and not (readable and bool(fits)):
                found, attn_mask, fits = hidden_of(shown)
                sizes = (x.shape[0], self.attention.num_heads, -1, -1)
                attn_mask, causal = attn_mask.expand(sizes).flatten(0, 1), False
            found = found.expand(x.shape[0], -1)
            padding = found if padding is None else padding | found
            if not readable:
                sure = fits
            elif not bool(fits):
                by = "it" if self.attention.any_mask else "convert_attention(model, any_mask=True)"
                raise ValueError(
                    f"the attention mask of shape {tuple(mask.shape)} hides other keys than padded"
                    f"{' and later' if causal else ''} ones (or adds to logits), which this layer is "
                    f"not certified for; {by} covers every mask that hides keys but never a token's own"
                )
        new: Tensor | None = None
        if first:
            out: Tensor = self.attention(
                x, key_padding_mask=padding, need_weights=False, attn_mask=attn_mask, is_causal=causal
            )[0]
            if past is not None:
                new = self.attention.new_keys(self.attention._batched(x, padding)[0])
        else:
            assert past is not None
            out, new = self._step(x, padding, past)
        if sure is not None:
            # Without a look at the mask's values: what is not covered gives no finite output.
            out = torch.where(sure, out, torch.nan)
        return self.after(out), new

    def _no_keys(self, x: Tensor) -> Tensor:
        """The past of a first token."""
        return x.new_empty(x.shape[0], self.attention.num_heads, 0, self.attention.key_width)

    def _step(self, x: Tensor, padding: Tensor | None, past: Tensor) -> tuple[Tensor, Tensor]:
        if self.attention.window is not None:
            raise ValueError(f"a layer with window={self.attention.window} takes no cache of its host")
        before, new = past.shape[-2], x.shape[1]
        if padding is not None and padding.shape[-1] != before + new:
            raise ValueError(
                f"the mask covers {padding.shape[-1]} tokens, {before} in the cache and {new} new"
            )
        old = KeyCache(past, before, None if padding is None else padding[:, :before])
        out, cache = self.attention.step(x, old, None if padding is None else padding[:, before:])
        return out, cache.keys[..., before:, :]


def _refuse(host: str, given: dict[str, Any]) -> None:
    """Raises for arguments that change attention in a way that L2 attention has no counterpart of."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(f"L2 attention in a model of {host} takes no {name}, got {type(value)}")


def _same_order(host: str, own: bool | None, given: bool | None) -> None:
    if given is not None and given is not own:
        raise ValueError(f"L2 attention in a model of {host} has is_causal={own}, got {given}")


class HuggingFaceAttention(HostedAttention):
    """In the place of the self-attention of a Hugging Face model.

    A cache (DynamicCache) keeps what :meth:`new_keys` of the attention gives: keys alone if tied.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention of hidden_states (B, T, D), and None in the place of its weights.

        Args:
            hidden_states: (B, T, D).
            attention_mask: (B, S) with 0 at padded tokens, or as in :func:`visible`.
            past_key_values: the cache, which is extended.
            kwargs: what concerns kernels only is left alone.
        """
        names = ("encoder_hidden_states", "head_mask", "output_attentions", "s_aux", "cu_seq_lens_q")
        _refuse("Hugging Face", {name: kwargs.get(name) for name in names})
        _same_order("Hugging Face", self.is_causal, kwargs.get("is_causal"))
        padding = None
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            padding, attention_mask = attention_mask == 0, None
        cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        past = None if cache is None else self._past(hidden_states, cache)
        out, keys = self._attend(hidden_states, padding, attention_mask, bool(self.is_causal), past)
        if keys is not None:
            cache.update(keys, keys[..., :0], self.layer_idx)
        return out, None

    def _past(self, x: Tensor, cache: Any) -> Tensor:
        """The keys in a cache (B, H, S, d)."""
        layers, index = cache.layers, self.layer_idx
        layer = layers[index] if index is not None and index < len(layers) else None
        if layer is not None and type(layer).__name__ != "DynamicLayer":
            _refuse("Hugging Face", {f"cache other than DynamicCache ({type(layer).__name__})": layer})
        keys: Tensor | None = getattr(layer, "keys", None)
        return keys if keys is not None and keys.numel() else self._no_keys(x)


class TimmAttention(HostedAttention):
    """In the place of timm's Attention."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attention of x (B, N, D); attn_mask as in :func:`visible`, without effect if is_causal."""
        return self._attend(x, None, None if is_causal else attn_mask, is_causal, None)[0]


class XTransformersAttention(HostedAttention):
    """In the place of x-transformers' Attention. A cache keeps keys alone."""

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        return_intermediates: bool = False,
        cache: Any = None,
        causal: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Attention of x (B, T, D), and Intermediates if wanted.

        Args:
            x: (B, T, D).
            context: must be None.
            mask: (B, T) with False at padded tokens, whose outputs are zero.
            context_mask: (B, S), of the keys; default ``mask``.
            attn_mask: as in :func:`visible`.
            return_intermediates: also return the cache.
            cache: of the step before.
            causal: must be None or as the layer is.
            kwargs: must be None.
        """
        _refuse("x-transformers", {"context": context, **kwargs})
        _same_order("x-transformers", self.is_causal, causal)
        valid = mask if context_mask is None else context_mask
        past = None
        if cache is not None:
            past = cache.cached_kv[0]
        elif return_intermediates and self.is_causal and attn_mask is None and not self.training:
            past = self._no_keys(x)
        padding = None if valid is None else ~valid
        out, keys = self._attend(x, padding, attn_mask, bool(self.is_causal), past)
        if mask is not None and cache is None:
            out = out.masked_fill(~mask.unsqueeze(-1), 0.0)
        if not return_intermediates:
            return out
        found = sys.modules["x_transformers.attend"].Intermediates()
        if keys is not None and past is not None:
            keys = torch.cat([past, keys], dim=-2)
            found.cached_kv = (keys, keys[..., :0])
        return out, found


def _bound(module: HostedAttention, ask: Ask) -> Bound:
    # Outputs that x-transformers sets to zero only make it smaller.
    return times(ask.child(module.attention, "attention"), ask.child(module.after, "after"))


for _host in (HuggingFaceAttention, TimmAttention, XTransformersAttention):
    register_bound(_host)(_bound)
