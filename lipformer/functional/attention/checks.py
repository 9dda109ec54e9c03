"""Checks of the arguments of L2 attention.

Every message echoes what was given and says what is allowed. Checks of shapes and types always run;
checks of values run where reading is free: on CPU and not while tracing (see :func:`values_readable`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

OWN_KEY_RULE = (
    "every token must be allowed to attend to itself (a mask that hides a query's own key makes "
    "L2 attention non-Lipschitz)"
)

_debug = False


@contextlib.contextmanager
def debug_checks(enabled: bool = True) -> Iterator[None]:
    """Context in which attention also checks its input for NaN and infinity.

    The check reads the whole input and synchronises the device, so it is off by default.

    Example:
        >>> import lipformer.functional as lff
        >>> with debug_checks():
        ...     lff.l2_attention(torch.full((1, 2, 4), float("nan")))
        Traceback (most recent call last):
        ...
        ValueError: y must be finite under debug_checks(), got 8 non-finite of 8 entries
    """
    global _debug
    before, _debug = _debug, enabled
    try:
        yield
    finally:
        _debug = before


def tracing() -> bool:
    """Whether values cannot be read: under torch.compile, torch.export or a torch.func transform."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def values_readable(t: Tensor) -> bool:
    """Reading a small CPU tensor is free; elsewhere it synchronises, so only under debug_checks()."""
    return not tracing() and (_debug or t.device.type == "cpu")


def check_tokens(y: Tensor, name: str = "y", layout: str = "(*, H, N, d)", min_dim: int = 3) -> None:
    """Raises unless ``y`` is a floating-point tensor of at least ``min_dim`` dimensions."""
    if not isinstance(y, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(y).__name__}")
    if not y.is_floating_point():
        raise TypeError(f"{name} must have a floating-point dtype, got {y.dtype}")
    if y.ndim < min_dim:
        raise ValueError(
            f"{name} must have shape {layout}, at least {min_dim} dimensions, got shape {tuple(y.shape)}"
        )
    if y.shape[-1] == 0 or y.shape[-2] == 0:
        raise ValueError(f"{name} must have at least one token and one feature, got {tuple(y.shape)}")
    if _debug and not tracing():
        bad = int((~torch.isfinite(y)).sum())
        if bad:
            raise ValueError(
                f"{name} must be finite under debug_checks(), got {bad} non-finite "
                f"of {y.numel()} entries"
            )


def check_window(window: int | None, is_causal: bool) -> None:
    """Raises unless ``window`` is None or a positive int together with ``is_causal``."""
    if window is None:
        return
    if isinstance(window, bool) or not isinstance(window, (int, torch.SymInt)) or window < 1:
        raise ValueError(f"window must be None or an integer >= 1, got {window!r}")
    if not is_causal:
        raise ValueError(
            f"window={window} keeps the latest keys, so it needs is_causal=True, got is_causal=False"
        )


def check_scale(scale: float | Tensor | None, heads: int) -> None:
    """Raises unless ``scale`` is None, a positive float, or a tensor that broadcasts to (H, 1, 1)."""
    if scale is None:
        return
    if isinstance(scale, Tensor):
        if scale.ndim not in (0, 3) or (
            scale.ndim == 3 and scale.shape not in ((heads, 1, 1), (1, 1, 1))
        ):
            raise ValueError(
                f"scale must be a positive float or a tensor of shape ({heads}, 1, 1), "
                f"got shape {tuple(scale.shape)}"
            )
        if values_readable(scale) and not bool((scale > 0).all()):
            raise ValueError(f"scale must be positive, got {scale.flatten().tolist()}")
    elif not (0.0 < float(scale) < math.inf):
        raise ValueError(f"scale must be positive and finite, got {scale!r}")


def check_slopes(slopes: Tensor | None, heads: int, is_causal: bool) -> None:
    """Raises unless ``slopes`` is None or (H,) and the attention is causal."""
    if slopes is None:
        return
    if not is_causal:
        raise ValueError("slopes (ALiBi) are causal: they need is_causal=True, got is_causal=False")
    if not isinstance(slopes, Tensor) or slopes.shape != (heads,):
        given = tuple(slopes.shape) if isinstance(slopes, Tensor) else repr(slopes)
        raise ValueError(f"slopes must be a tensor with one slope per head, ({heads},), got {given}")
    if values_readable(slopes) and not bool((slopes >= 0).all()):
        raise ValueError(f"slopes must be >= 0, got {slopes.tolist()}")


def check_bias(bias: Tensor | None, y: Tensor) -> Tensor | None:
    """Raises unless ``bias`` broadcasts to (*, H, N, N) and leaves every own key visible.

    Where values are not read, a row without its own key becomes NaN instead, in the bias returned.
    """
    if bias is None:
        return None
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        given = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise TypeError(
            f"bias must be a floating-point tensor added to the logits (-inf hides a key), got {given}"
        )
    full = (*y.shape[:-1], y.shape[-2])
    try:
        shape = torch.broadcast_shapes(bias.shape, full)
    except RuntimeError:
        shape = torch.Size()
    if shape != torch.Size(full):
        raise ValueError(f"bias must broadcast to (*, H, N, N) = {full}, got {tuple(bias.shape)}")
    bias = bias.expand(*bias.shape[:-2], *full[-2:])
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
    if not isinstance(mask, Tensor):
        raise TypeError(f"key_padding_mask must be a tensor or None, got {type(mask).__name__}")
    tokens = (*y.shape[:-3], y.shape[-2])
    if mask.shape != tokens:
        raise ValueError(f"key_padding_mask must have shape (*, N) = {tokens}, got {tuple(mask.shape)}")
    if mask.dtype == torch.bool:
        return mask
    if mask.is_floating_point():
        if values_readable(mask) and not bool(((mask == 0) | (mask == -math.inf)).all()):
            odd = mask[(mask != 0) & (mask != -math.inf)][0].item()
            raise ValueError(f"a float key_padding_mask may hold only 0 and -inf, got {odd}")
        return mask == -math.inf
    raise TypeError(
        f"key_padding_mask must be bool (True = padded) or float (-inf = padded), got {mask.dtype}"
    )
