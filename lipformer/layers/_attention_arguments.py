"""Checks of L2MultiheadAttention's arguments: each error names the value and the rule."""

from __future__ import annotations

from collections.abc import Sequence

from lipformer.functional._checks import check_window

POSITIONS = (None, "alibi", "rotary")


def check_arguments(
    embed_dim: int,
    num_heads: int,
    *,
    dropout: float,
    causal: bool | None,
    window: int | None,
    positions: str | None,
    max_len: int | None,
    slopes: Sequence[float] | None,
) -> None:
    """Raises ValueError for arguments that do not fit together."""
    for name, number in (("embed_dim", embed_dim), ("num_heads", num_heads)):
        if not isinstance(number, int):
            raise ValueError(f"{name} must be an integer, got {number!r}")
    if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
        raise ValueError(
            "embed_dim must be a positive multiple of num_heads, "
            f"got embed_dim={embed_dim}, num_heads={num_heads}"
        )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be in [0, 1), got {dropout!r}")
    if causal is not None and not isinstance(causal, bool):
        raise ValueError(f"causal must be True, False or None, got {causal!r}")
    if positions not in POSITIONS:
        raise ValueError(f"positions must be None, 'alibi' or 'rotary', got {positions!r}")
    if positions == "alibi" and causal is not True:
        raise ValueError(f"positions='alibi' needs causal=True, got causal={causal}")
    if slopes is not None and positions != "alibi":
        raise ValueError(f"slopes need positions='alibi', got positions={positions!r}")
    if max_len is not None and not (isinstance(max_len, int) and max_len >= 1):
        raise ValueError(f"max_len must be None or an integer >= 1, got {max_len!r}")
    if window is not None and causal is not True:
        raise ValueError(f"window={window} needs causal=True, got causal={causal}")
    check_window(window, True)
    head_dim = embed_dim // num_heads
    if positions == "rotary" and head_dim % 2:
        raise ValueError(f"positions='rotary' needs an even head width, got {head_dim}")
