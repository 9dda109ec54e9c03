"""The norms of a sequence of tokens in which Lipschitz constants are taken (docs/theory, "Notation")."""

from __future__ import annotations

NORMS = ("l2", "token", "self", "linf")


def check_norm(norm: str, allowed: tuple[str, ...] = NORMS) -> None:
    """ValueError unless ``norm`` is one of those allowed."""
    if norm not in allowed:
        raise ValueError(f"norm must be one of {', '.join(allowed)}, got {norm!r}")
