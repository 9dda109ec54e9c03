"""The norms of a sequence of tokens in which Lipschitz constants are taken (docs/theory, "Notation")."""

from __future__ import annotations

from torch import Tensor

NORMS = ("l2", "token", "self", "linf")


def check_norm(norm: str, allowed: tuple[str, ...] = NORMS) -> None:
    """ValueError unless ``norm`` is one of those allowed."""
    if norm not in allowed:
        raise ValueError(f"norm must be one of {', '.join(allowed)}, got {norm!r}")


def max_abs(tensor: Tensor) -> Tensor:
    """max|entry| in float64, a scalar; 0 of none."""
    wide = tensor.double().abs()
    return wide.amax() if tensor.numel() else wide.sum()
