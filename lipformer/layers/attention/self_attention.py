"""What self-attention layers share that are called like nn.MultiheadAttention."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from lipformer.certificate.rules import Refuse, refuse_hooks
from lipformer.layers import layout
from lipformer.layers.layer import Layer


class _NoFastPath:
    """Stands where nn.TransformerEncoder looks for a packed input weight.

    An object with ``__torch_function__`` makes it take the plain path, which calls our forward; the
    fused inference path would compute dot-product attention from the weights behind our back.
    """

    requires_grad = False

    @classmethod
    def __torch_function__(cls, *args: object, **kwargs: object) -> object:
        return NotImplemented


def check_settings(
    embed_dim: int, num_heads: int, dropout: float, max_len: int | None, **flags: bool
) -> None:
    """Raises ValueError for arguments that no self-attention has."""
    for name, number in (("embed_dim", embed_dim), ("num_heads", num_heads)):
        if type(number) is bool or not isinstance(number, int):
            raise ValueError(f"{name} must be an integer, got {number!r}")
    if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
        raise ValueError(
            "embed_dim must be a positive multiple of num_heads, "
            f"got embed_dim={embed_dim}, num_heads={num_heads}"
        )
    if not isinstance(dropout, (int, float)) or not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be in [0, 1), got {dropout!r}")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name} must be True or False, got {flag!r}")
    if max_len is not None and (type(max_len) is bool or not isinstance(max_len, int) or max_len < 1):
        raise ValueError(f"max_len must be None or an integer >= 1, got {max_len!r}")


class SelfAttention(Layer):
    """Projections that are read as weight and bias, and tokens in the layouts of nn.MultiheadAttention.

    Attributes:
        projections: names of the linear layers, the first of which every layer has.
    """

    # Attributes that nn.TransformerEncoder and nn.TransformerEncoderLayer read to decide on their
    # inference fast path; these values keep it off.
    _qkv_same_embed_dim = False
    in_proj_bias = None
    in_proj_weight = _NoFastPath()

    projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "out_proj")
    q_proj: nn.Linear
    embed_dim: int
    num_heads: int
    batch_first: bool
    max_len: int | None

    @property
    def head_dim(self) -> int:
        """d."""
        return self.embed_dim // self.num_heads

    def check_projections(self, refuse: Refuse | None = None) -> None:
        """Raises for projections that are more than the weight and bias that the layer reads of them."""
        refuse = self._refuse if refuse is None else refuse
        plain = "nn.Linear, whose weight may have torch parametrizations"
        for name in self.projections:
            linear = self._modules.get(name)
            if linear is None:
                continue
            if type(linear).forward is not nn.Linear.forward:
                raise refuse(
                    f"its {name} is {type(linear).__name__}, whose forward is not that of nn.Linear; "
                    "the layer reads the weight and bias alone and would ignore the rest",
                    plain,
                )
            refuse_hooks(linear, lambda reason, use: refuse(f"{name}: {reason}", use), plain)  # noqa: B023

    def _refuse(self, reason: str, instead: str) -> Exception:
        return TypeError(f"{type(self).__name__} cannot run: {reason}; use {instead}")

    def _one_tensor(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
        """Raises unless query, key and value are one."""
        for name, other in (("key", key), ("value", value)):
            if other is not None and other is not query:
                raise ValueError(
                    f"query and {name} must be one and the same tensor ({type(self).__name__} is "
                    f"self-attention): call layer(x) or layer(x, x, x), not with a copy; got two "
                    f"of shapes {tuple(query.shape)} and {tuple(other.shape)}"
                )

    def _stored(self) -> Tensor:
        """A weight as stored, for shape and dtype: each look at a bounded one computes the bound."""
        raw = self.q_proj._parameters.get("weight")
        if raw is not None:
            return raw
        try:
            return self.q_proj.get_parameter("parametrizations.weight.original")
        except AttributeError:
            # Of several originals, as those of weight_norm, none is like the weight; a wrapper has none.
            self.check_projections()
            return self.q_proj.weight

    def _wide(self) -> torch.dtype:
        return torch.promote_types(self._stored().dtype, torch.float32)

    def _batched(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The input as (B, N, D), zero at padded tokens, and its padding (B, N) or None."""
        x = layout.batched(x, self.embed_dim, self.batch_first)
        if self.max_len is not None and x.shape[1] > self.max_len:
            raise ValueError(f"max_len is {self.max_len}, got {x.shape[1]} tokens")
        dtype = self._stored().dtype
        if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"query must have the layer's dtype {dtype}, got {x.dtype}")
        padding = layout.padding(mask, x)
        if padding is not None:
            # Whatever stands there, NaN included, must not reach the gradients of the weights.
            x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        return x, padding
