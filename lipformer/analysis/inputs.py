"""What bounds are asked at: finite tokens in the order that is meant, and radii."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipformer.certificate import NotCertifiable
from lipformer.certificate.rules import kind_of
from lipformer.functional.attention.maps import count_false


def check_tokens(x: Tensor, width: int | None = None) -> None:
    """ValueError unless x are finite tokens.

    Args:
        x: (*, N, D), floating point, N >= 1.
        width: D; any if None.
    """
    fits = x.ndim >= 2 and x.shape[-2] > 0 and width in (None, x.shape[-1])
    if not fits or not x.is_floating_point():
        raise ValueError(
            f"x must be floating-point tokens (*, N, {width or 'D'}) with N >= 1, got {x.dtype} "
            f"{tuple(x.shape)}"
        )
    check_finite(x)


def check_finite(x: Tensor, what: str = "x") -> None:
    """ValueError for NaN or infinite entries: a bound at such a point would be NaN, and mean nothing."""
    bad = count_false(x.isfinite())
    if bad:
        raise ValueError(
            f"{what} must be finite, got {bad} of {x.numel()} entries that are NaN or infinite"
        )


def check_samples(x: Tensor) -> None:
    """ValueError unless x are finite samples (B, *): the entries of one alone would count as samples."""
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(
            "x must be floating-point samples (B, D), (B, N, D) or images, "
            f"of symbols model.embed(tokens); got {x.dtype} {tuple(x.shape)}"
        )
    check_finite(x)


def check_order(layer: object, x: Tensor) -> None:
    """ValueError for a batch of tokens beside a layer that takes its batch second.

    Its forward would read x as (N, B, D), a bound as (B, N, D), and be one of another input.
    """
    if isinstance(layer, nn.Module) and not getattr(layer, "batch_first", True) and x.ndim > 2:
        # Maps have no order of their own; L2 attention has no maps.
        dot = isinstance(layer, nn.MultiheadAttention)
        instead = "transpose x and give attention_maps(layer), or " if dot else ""
        raise ValueError(
            f"tokens are (B, N, D), and this layer has batch_first=False: {instead}build the layer with "
            f"batch_first=True; got x of shape {tuple(x.shape)}"
        )


def refuse_autocast(module: nn.Module) -> None:
    """NotCertifiable where autocast rounds the weights: the bound would be one of other weights."""
    devices = {t.device.type for t in module.parameters() if t.dtype != torch.float64}
    if any(map(torch.is_autocast_enabled, devices)):
        raise NotCertifiable("", kind_of(module), "autocast rounds its weights", "leaving autocast")


def radii(given: float | Tensor, shape: torch.Size, device: torch.device, name: str) -> Tensor:
    """A radius for each sample, of the shape in float64; ValueError unless finite and not negative."""
    found = torch.as_tensor(given, dtype=torch.float64, device=device).detach()
    if found.shape not in ((), shape) or not bool(((found >= 0) & found.isfinite()).all()):
        raise ValueError(
            f"{name} must be finite and not negative, a number or of shape {tuple(shape)}, got {given!r}"
        )
    return found.expand(shape)
