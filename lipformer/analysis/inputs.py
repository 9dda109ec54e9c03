"""What the functions here take as tokens, masks, radii and counts, checked in one place."""

from __future__ import annotations

import math
from numbers import Integral, Real

import torch
from torch import Tensor, nn

from lipformer.functional.attention.maps import count_false


def check_tokens(x: Tensor, width: int | None = None) -> None:
    """ValueError unless x are finite tokens.

    Args:
        x: (*, N, D), floating point, N >= 1.
        width: D; any if None.
    """
    shape = f"(*, N, {'D' if width is None else width})"
    fits = isinstance(x, Tensor) and x.ndim >= 2 and (width is None or x.shape[-1] == width)
    if not fits or x.shape[-2] < 1 or not x.is_floating_point():
        got = f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be floating-point tokens {shape} with N >= 1, got {got}")
    check_finite(x)


def check_finite(x: Tensor, what: str = "x") -> None:
    """ValueError for NaN or infinite entries: a bound at such a point would be NaN, and mean nothing."""
    bad = count_false(x.isfinite())
    if bad:
        raise ValueError(
            f"{what} must be finite, got {bad} of {x.numel()} entries that are NaN or infinite"
        )


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


def check_samples(x: Tensor, name: str = "x") -> None:
    """ValueError unless x are finite samples (B, *, D) in floating point."""
    if not isinstance(x, Tensor) or x.ndim < 2 or not x.is_floating_point():
        got = f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be floating-point samples (B, D), (B, N, D) or images, got {got}")
    check_finite(x, name)


def number(given: float | Tensor, name: str, *, positive: bool = False) -> float:
    """A finite number that is positive, or not negative; ValueError for others and other types."""
    plain = isinstance(given, Real) and not isinstance(given, bool)
    single = isinstance(given, Tensor) and given.ndim == 0 and _is_real(given)
    value = float(given) if plain or single else math.nan
    if not value >= 0 or value == math.inf or (positive and value == 0):
        allowed = "positive and finite" if positive else "finite and not negative"
        raise ValueError(f"{name} must be {allowed}, got {given!r}")
    return value


def count(given: int, name: str) -> int:
    """An integer >= 1; ValueError for others, bool among them."""
    if isinstance(given, bool) or not isinstance(given, Integral) or given < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {given!r}")
    return int(given)


def radii(given: float | Tensor, shape: torch.Size, device: torch.device, name: str) -> Tensor:
    """A radius for each sample, of the shape in float64; ValueError unless finite and not negative."""
    if isinstance(given, Tensor) and given.ndim:
        bad = not _is_real(given) or not bool(((given >= 0) & given.isfinite()).all())
        if bad:
            raise ValueError(f"{name} must be finite and not negative, got {given!r}")
        if given.shape != shape:
            raise ValueError(
                f"{name} must be a number or of shape {tuple(shape)}, got {tuple(given.shape)}"
            )
        return given.detach().to(device, torch.float64)
    return torch.full(shape, number(given, name), dtype=torch.float64, device=device)


def _is_real(x: Tensor) -> bool:
    return x.dtype != torch.bool and not x.is_complex()
