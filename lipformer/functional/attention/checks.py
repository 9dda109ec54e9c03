"""Checks of the arguments of L2 attention, where a wrong one would give another function silently.

Checks of shapes and types always run; checks of values run where reading is free: on CPU and not while
tracing (see :func:`values_readable`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipformer.functional.tracing import debugging, values_readable

OWN_KEY_RULE = (
    "every token must be allowed to attend to itself (a mask that hides a query's own key makes "
    "L2 attention non-Lipschitz)"
)


def check_tokens(y: Tensor, name: str = "y", layout: str = "(*, H, N, d)", min_dim: int = 3) -> None:
    """Raises unless ``y`` is a floating-point tensor of at least ``min_dim`` dimensions, not empty."""
    if y.ndim < min_dim or 0 in y.shape[-2:] or not y.is_floating_point():
        raise ValueError(
            f"{name} must be floating-point tokens {layout}, at least one token and one feature, got "
            f"{y.dtype} {tuple(y.shape)}"
        )
    bad = int((~torch.isfinite(y)).sum()) if debugging() else 0
    if bad:
        raise ValueError(
            f"{name} must be finite under debug_checks(), got {bad} non-finite of {y.numel()} entries"
        )


def check_window(window: int | None, is_causal: bool) -> None:
    """Raises unless ``window`` is None, or a positive integer together with ``is_causal``."""
    if window is not None and not (isinstance(window, int) and window >= 1 and is_causal):
        raise ValueError(
            "window must be None, or at least 1 (an integer) with is_causal=True (it keeps the latest "
            f"keys), got window={window}, is_causal={is_causal}"
        )


def check_scale(scale: float | Tensor | None, heads: int, name: str = "scale") -> None:
    """Raises unless a ``scale`` is None, a positive float, or positive of a shape () or (H, 1, 1)."""
    if scale is None:
        return
    if isinstance(scale, Tensor):
        fits = scale.shape in ((), (1, 1, 1), (heads, 1, 1))
        fits = fits and (not values_readable(scale) or bool((scale > 0).all()))
    else:
        fits = 0.0 < scale < math.inf
    if not fits:
        raise ValueError(f"{name} must be positive, a float or of shape ({heads}, 1, 1), got {scale}")


def check_slopes(slopes: Tensor | None, heads: int, is_causal: bool) -> None:
    """Raises unless ``slopes`` is None, or (H,), not negative, and the attention causal."""
    if slopes is None:
        return
    fits = is_causal and slopes.shape == (heads,)
    if not fits or (values_readable(slopes) and not bool((slopes >= 0).all())):
        raise ValueError(
            f"slopes (ALiBi) must be {heads} numbers >= 0, one per head, and need is_causal=True; got "
            f"{slopes}, is_causal={is_causal}"
        )


def expand_bias(bias: Tensor, full: tuple[int, ...], layout: str) -> Tensor:
    """The bias with all queries and keys; raises unless it is added to logits of the shape ``full``."""
    try:
        fits = torch.broadcast_shapes(bias.shape, full) == full and bias.is_floating_point()
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            "bias must be floating point, added to the logits (-inf hides a key), and broadcast to "
            f"{layout} = {full}, got {bias.dtype} {tuple(bias.shape)}"
        )
    return bias.expand(*bias.shape[:-2], *full[-2:])


def check_bias(bias: Tensor | None, y: Tensor) -> Tensor | None:
    """Raises unless ``bias`` broadcasts to (*, H, N, N) and leaves every own key visible.

    Where values are not read, a row without its own key becomes NaN instead, in the bias returned.
    """
    if bias is None:
        return None
    bias = expand_bias(bias, (*y.shape[:-1], y.shape[-2]), "(*, H, N, N)")
    lost = ~torch.isfinite(torch.diagonal(bias, dim1=-2, dim2=-1))
    if not values_readable(bias):
        return bias.masked_fill(lost.unsqueeze(-1), torch.nan)
    if bool(lost.any()):
        *lead, i = lost.nonzero()[0].tolist()
        raise ValueError(
            f"bias hides or leaves undefined query {i}'s own key (its diagonal entry is "
            f"{bias[tuple(lead)][i, i].item()}): {OWN_KEY_RULE}"
        )
    return bias


def check_attention(
    y: Tensor,
    is_causal: bool,
    window: int | None,
    slopes: Tensor | None,
    bias: Tensor | None,
    scale: float | Tensor | None,
    key_padding_mask: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Checks the arguments that all forms of L2 attention share.

    Returns:
        The padding as bool, and the bias as :func:`check_bias` returns it.
    """
    check_tokens(y)
    check_window(window, is_causal)
    check_scale(scale, y.shape[-3])
    check_slopes(slopes, y.shape[-3], is_causal)
    return as_padding(key_padding_mask, y), check_bias(bias, y)


def as_padding(mask: Tensor | None, y: Tensor) -> Tensor | None:
    """Returns a key padding mask as bool (*, N), True at padded tokens.

    Args:
        mask: (*, N) bool, True at padded tokens, or float, -inf at padded tokens and 0 elsewhere
            (the form nn.TransformerEncoder hands down).
        y: (*, H, N, d).
    """
    if mask is None:
        return None
    tokens = (*y.shape[:-3], y.shape[-2])
    if mask.shape != tokens or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(
            f"key_padding_mask must be bool (True = padded) or float (-inf = padded) of shape (*, N) = "
            f"{tokens}, got {mask.dtype} {tuple(mask.shape)}"
        )
    if mask.dtype == torch.bool:
        return mask
    hidden = mask == -math.inf
    if values_readable(mask) and not bool((hidden | (mask == 0)).all()):
        odd = mask[~hidden & (mask != 0)][0].item()
        raise ValueError(f"a float key_padding_mask may hold only 0 and -inf, got {odd}")
    return hidden
