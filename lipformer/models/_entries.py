"""Checks that the configs of all models share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """ValueError unless the value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def is_number(value: object) -> bool:
    """Whether a value is a real number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def known_entries(config_class: type, entries: object) -> dict[str, Any]:
    """The entries of a config as keyword arguments.

    Args:
        config_class: a dataclass.
        entries: names and values, as a JSON file has them.

    Raises:
        ValueError: an entry is unknown or missing; it says which.
    """
    if not isinstance(entries, Mapping):
        raise ValueError(f"a config is a mapping of names to values, got {type(entries).__name__}")
    fields = dataclasses.fields(config_class)
    known = [field.name for field in fields]
    unknown = [str(name) for name in entries if name not in known]
    if unknown:
        raise ValueError(f"unknown entries {', '.join(unknown)}; allowed are {', '.join(known)}")
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    missing = [name for name in required if name not in entries]
    if missing:
        raise ValueError(f"missing entries: {', '.join(missing)}")
    return dict(entries)
