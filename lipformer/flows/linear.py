"""Invertible maps of single tokens: what they share, a linear map and a fixed permutation."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.certificate.linear_rules import linear_bound
from lipformer.layers.layout import padding, without_padding


class WithLogDet(nn.Module, ABC):
    """An invertible map whose log-determinant is a function of the shape and the padding alone."""

    @abstractmethod
    def inverse(self, y: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """The inverse, exact up to rounding: (B, T, D) -> (B, T, D)."""

    @abstractmethod
    def _log_det(self, x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """log|det J| (B,) for x (B, T, D), its input or its output."""

    def forward_and_log_det(
        self, x: Tensor, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The output (B, T, D) and log|det| per sample (B,)."""
        # The first batch may set what the log-determinant is made of: forward comes first.
        return self.forward(x, key_padding_mask), self._log_det(x, key_padding_mask)

    def inverse_and_log_det(
        self, y: Tensor, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The input (B, T, D) and log|det| of the inverse per sample (B,)."""
        return self.inverse(y, key_padding_mask), -self._log_det(y, key_padding_mask)


class TokenWise(WithLogDet):
    r"""An invertible map g of single tokens whose :math:`\log|\det g'|` is the same for all of them.

    A subclass gives the map, its inverse and the log-determinant of one token. Padded tokens pass
    unchanged and contribute nothing:
    :math:`\log|\det J|(x) = \#\{\text{unpadded tokens of } x\}\;\log|\det g'|`.

    Args:
        dim: D, the number of features.
    """

    # For step_module and own-token blocks: nothing of other tokens is looked at.
    token_wise = True

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    @abstractmethod
    def token_map(self, x: Tensor) -> Tensor:
        """g of tokens (B, T, D)."""

    @abstractmethod
    def token_inverse(self, y: Tensor) -> Tensor:
        """The inverse of g, (B, T, D)."""

    @abstractmethod
    def token_log_det(self) -> Tensor:
        """log|det g'| of one token, a scalar."""

    def prepare(self, x: Tensor, padded: Tensor | None) -> None:
        """Called before every forward pass, with the mask as bool (B, T) or None."""

    # What follows is final.

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        padded = self._padded(x, key_padding_mask)
        self.prepare(x, padded)
        # Not even a NaN in a padded token may reach the gradients of the weights.
        return keep_padded(padded, x, self.token_map(without_padding(x, padded)))

    def inverse(self, y: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """The inverse, exact up to rounding: (B, T, D) -> (B, T, D)."""
        padded = self._padded(y, key_padding_mask)
        return keep_padded(padded, y, self.token_inverse(without_padding(y, padded)))

    def extra_repr(self) -> str:
        return f"{self.dim}"

    def _padded(self, x: Tensor, key_padding_mask: Tensor | None) -> Tensor | None:
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"the input must be (B, T, D) with D={self.dim}, got {tuple(x.shape)}")
        return padding(key_padding_mask, x)

    def _log_det(self, x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        padded = padding(key_padding_mask, x)
        one = self.token_log_det().to(torch.promote_types(x.dtype, torch.float32))
        if padded is None:
            return (one * x.shape[1]).expand(x.shape[0])
        return one * (~padded).sum(-1)


def keep_padded(padded: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
    """y, but x where a token is padded."""
    return y if padded is None else torch.where(padded.unsqueeze(-1), x.to(y.dtype), y)


class InvertibleLinear(TokenWise):
    r""":math:`y = W x` for each token, :math:`W = P L (U + \operatorname{diag}(\pm e^s))`.

    P is a fixed permutation, L unit lower and U strictly upper triangular, so that
    :math:`\log|\det W| = \sum_k s_k` and the inverse takes two triangular solves. W starts as a
    random rotation. Source: Kingma and Dhariwal 2018 (Glow).

    Args:
        dim: D, the number of features.

    Example:
        >>> layer = InvertibleLinear(4)
        >>> x = torch.randn(2, 3, 4)
        >>> bool((layer.inverse(layer(x)) - x).abs().max() < 1e-5)
        True
    """

    order: Tensor
    signs: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        rotation = nn.init.orthogonal_(torch.empty(dim, dim, dtype=torch.float64))
        permutation, lower, upper = torch.linalg.lu(rotation)
        diagonal = upper.diagonal()
        dtype = torch.get_default_dtype()
        self.register_buffer("order", permutation.argmax(1))
        self.register_buffer("signs", diagonal.sign().to(dtype))
        self.lower = nn.Parameter(lower.tril(-1).to(dtype))
        self.upper = nn.Parameter(upper.triu(1).to(dtype))
        self.log_diagonal = nn.Parameter(diagonal.abs().log().to(dtype))

    def _factors(self) -> tuple[Tensor, Tensor]:
        """L and U + diag, (D, D) each."""
        one = torch.eye(self.dim, dtype=self.lower.dtype, device=self.lower.device)
        diagonal = torch.diag(self.signs * self.log_diagonal.exp())
        return self.lower.tril(-1) + one, self.upper.triu(1) + diagonal

    def weight(self) -> Tensor:
        """W, (D, D)."""
        # Under autocast the product would be rounded, and the determinant not be that of W.
        with torch.autocast(self.lower.device.type, enabled=False):
            lower, upper = self._factors()
            return (lower @ upper).index_select(0, self.order)

    def token_map(self, x: Tensor) -> Tensor:
        """x W^T."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, self.weight().to(x.dtype))

    def token_inverse(self, y: Tensor) -> Tensor:
        """x with x W^T = y, by two triangular solves."""
        # LAPACK has no half precision.
        wide = torch.promote_types(y.dtype, torch.float32)
        lower, upper = (factor.to(wide) for factor in self._factors())
        columns = y.to(wide).index_select(-1, self.order.argsort()).flatten(0, -2).mT
        columns = torch.linalg.solve_triangular(lower, columns, upper=False, unitriangular=True)
        columns = torch.linalg.solve_triangular(upper, columns, upper=True)
        return columns.mT.reshape(y.shape).to(y.dtype)

    def token_log_det(self) -> Tensor:
        """The sum of s."""
        return self.log_diagonal.sum()


class Permutation(TokenWise):
    """A fixed permutation of the features, drawn at construction; its log-determinant is zero.

    Args:
        dim: D, the number of features.
        generator: of the random permutation.

    Example:
        >>> layer = Permutation(4)
        >>> x = torch.randn(2, 3, 4)
        >>> torch.equal(layer.inverse(layer(x)), x)
        True
    """

    order: Tensor

    def __init__(self, dim: int, generator: torch.Generator | None = None) -> None:
        super().__init__(dim)
        self.register_buffer("order", torch.randperm(dim, generator=generator))

    def token_map(self, x: Tensor) -> Tensor:
        """Feature k of the output is feature order[k]."""
        return x.index_select(-1, self.order)

    def token_inverse(self, y: Tensor) -> Tensor:
        """The inverse permutation."""
        return y.index_select(-1, self.order.argsort())

    def token_log_det(self) -> Tensor:
        """Zero."""
        return torch.zeros((), device=self.order.device)


def at_least_one(value: Tensor) -> Tensor:
    """A bound that also covers padded tokens, which pass unchanged."""
    return value.clamp_min(1.0)


@register_bound(InvertibleLinear)
def _(module: InvertibleLinear, ask: Ask) -> Bound:
    bound = linear_bound(module.weight(), ask)
    return Bound(at_least_one(torch.as_tensor(bound.value)), f"{bound.theorem}, 1 at padding")


@register_bound(Permutation)
def _(module: Permutation, ask: Ask) -> Bound:
    return Bound(1.0, "permutation of features")
