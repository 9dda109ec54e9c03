"""Multi-head dot-product attention as maps of single tokens: the form that all bounds are written in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

_Parts = TypeVar("_Parts", bound="TensorParts")


class TensorParts:
    """A dataclass some of whose fields are tensors, which are changed together."""

    def each(self: _Parts, change: Callable[[Tensor], Tensor]) -> _Parts:
        """The same with every tensor changed."""
        parts = {name: change(part) for name, part in vars(self).items() if isinstance(part, Tensor)}
        return dataclasses.replace(self, **parts)  # type: ignore[type-var]

    def to(self: _Parts, dtype: torch.dtype) -> _Parts:
        """The same in another dtype."""
        return self.each(lambda part: part.to(dtype))


@dataclass(frozen=True, eq=False)
class AttentionMaps(TensorParts):
    r"""Attention of tokens (rows) x with logits and values that are maps of single tokens.

    .. math:: S^h_{ij} = (x_i A_h + b_h) \cdot x_j, \qquad
              f(x)_i = c + \sum_h \sum_j \mathrm{softmax}_j(S^h_{ij})\, x_j W_h

    Every multi-head dot-product attention has this form: :math:`A_h = s\,Q_h K_h^\top` with the scale s
    (:math:`1/\sqrt d`), :math:`W_h = V_h O_h`. Of the biases only that of the query matters for the
    weights, :math:`b_h = s\,K_h q_h`: the key's adds a constant to each row of logits. Rows of weights
    sum to one, so that value and output biases are one constant c.

    Attributes:
        logits: A, (H, D, D).
        values: W, (H, D, E).
        offset: b, (H, D); zero by default.
        constant: c, (E,); zero by default.
        causal: token i sees tokens j <= i alone.
    """

    logits: Tensor
    values: Tensor
    offset: Tensor | None = None
    constant: Tensor | None = None
    causal: bool = False

    def __post_init__(self) -> None:
        h, d, e = self.values.shape if self.values.ndim == 3 else (0, 0, 0)
        shapes = {"logits": (h, d, d), "values": (h, d, e), "offset": (h, d), "constant": (e,)}
        for name, shape in shapes.items():
            part = getattr(self, name)
            if part is not None and (0 in shape or part.shape != shape or not part.is_floating_point()):
                raise ValueError(
                    "logits must be (H, D, D), values (H, D, E), offset (H, D) and constant (E,), all "
                    f"floating point and not empty, got {name} of {part.dtype} {tuple(part.shape)}"
                )

    @classmethod
    def from_projections(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        *,
        scale: float,
        query_bias: Tensor | None = None,
        value_bias: Tensor | None = None,
        out_bias: Tensor | None = None,
        causal: bool = False,
    ) -> AttentionMaps:
        """From the projections of each head, differentiably; always in float64.

        Products in the dtype of the weights would be those of another layer, and a bound of it may lie
        below the gain of this one. In float64 they are exact to :math:`d\\,2^{-53}` of the sum of the
        absolute values of their terms.

        Args:
            query: (H, D, d), applied as x @ query.
            key: (H, D, d); its bias has no effect.
            value: (H, D, e).
            out: (H, e, E): the rows of the output projection that belong to the head.
            scale: of the logits, usually d^-1/2.
            query_bias: (H, d).
            value_bias: (H, e).
            out_bias: (E,).
            causal: token i sees tokens j <= i alone.
        """
        query, key, value, out = (part.double() for part in (query, key, value, out))
        offset = None if query_bias is None else scale * (key @ query_bias.double()[..., None])[..., 0]
        constant = None if out_bias is None else out_bias.double()
        if value_bias is not None:
            shift = torch.einsum("he,hef->f", value_bias.double(), out)
            constant = shift if constant is None else shift + constant
        return cls(scale * query @ key.mT, value @ out, offset, constant, causal)

    def queries(self, x: Tensor) -> Tensor:
        """x A + b of every head, (*, N, D) -> (*, H, N, D), in x's dtype."""
        rows = x[..., None, :, :] @ self.logits.to(x.dtype)
        return rows if self.offset is None else rows + self.offset.to(x.dtype)[:, None]

    def largest_logit(self, x: Tensor) -> float:
        """max |query| max |token|: the scale of the rounding errors of the logits."""
        return float(self.queries(x).norm(dim=-1).amax() * x.norm(dim=-1).amax())

    def weights(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The softmax weights P, (*, H, N, N), of tokens x (*, N, D), computed in x's dtype.

        Args:
            x: tokens.
            mask: bool, True where token i may see token j, broadcastable to (*, 1, N, N); combined
                with `causal`. Every token must see at least one, else ValueError.
        """
        scores = self.queries(x) @ x[..., None, :, :].mT
        allowed = self.allowed(x, mask)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        return scores.softmax(-1)

    def allowed(self, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """`causal` and mask as one bool mask broadcastable to (*, H, N, N); None if all see all."""
        n = x.shape[-2]
        if self.causal:
            lower = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
            mask = lower if mask is None else lower & mask
        if mask is not None:
            check_mask(mask, n)
        return mask

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """f(x), (*, N, D) -> (*, N, E), computed in x's dtype."""
        mixed = self.weights(x, mask) @ x[..., None, :, :]
        out = torch.einsum("...hnd,hde->...ne", mixed, self.values.to(x.dtype))
        return out if self.constant is None else out + self.constant.to(x.dtype)


def check_mask(mask: Tensor, n: int) -> None:
    """Raises unless a mask is bool, True where token i may see token j, and leaves each token a key.

    Args:
        mask: broadcastable to (*, H, N, N).
        n: N.
    """
    if mask.dtype != torch.bool or any(size not in (1, n) for size in mask.shape[-2:]):
        raise ValueError(
            f"mask must be bool (True where i may see j), broadcastable to (*, H, N, N) with N = {n}, "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    rows = mask.any(-1)
    count = count_false(rows)
    if count:
        raise ValueError(
            f"{count} of {rows.numel()} rows of the mask, with causality, leave a token without a key; "
            "a mask is True where token i may see token j, the opposite of the attn_mask and "
            "key_padding_mask of torch.nn.MultiheadAttention: give ~attn_mask"
        )


def count_false(flags: Tensor) -> int:
    """How many are False; 0 inside `torch.func.vmap`, where no value can be looked at."""
    try:
        return flags.numel() - int(flags.sum())
    except RuntimeError as error:
        if "vmap" in str(error):
            return 0
        raise
