"""Checks that the configs of all models share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# Weights are float32 by default, which ends at 3e38; this leaves room for products.
LARGEST_NUMBER = 1e30
# Of one entry: far beyond every use, and small enough for torch's sizes and for tuples of that length.
LARGEST_SIZE = 2**24
MOST_LAYERS = 10_000
# 40 GB in float32.
MOST_PARAMETERS = 10**10


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """ValueError unless the value is one of those allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {echo(value)}")


def is_number(value: object) -> bool:
    """Whether a value is a finite real number that a float32 can hold; True and False are none."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return real and -LARGEST_NUMBER <= value <= LARGEST_NUMBER  # type: ignore[operator]


def is_positive(value: object) -> bool:
    """Whether a value is a positive number that a float32 can hold, and its inverse too."""
    return is_number(value) and value >= 1.0 / LARGEST_NUMBER  # type: ignore[operator]


def check_positive(name: str, value: object) -> None:
    """ValueError unless :func:`is_positive`."""
    if not is_positive(value):
        raise ValueError(
            f"{name} must be positive and finite, got {echo(value)}; allowed is 1e-30 to 1e30"
        )


def check_size(name: str, value: object, most: int = LARGEST_SIZE) -> None:
    """ValueError unless a value is an integer from 1 to ``most``; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {echo(value)}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {echo(value)}")


def check_parameters(count: int, sizes: Mapping[str, int]) -> None:
    """ValueError if a model would have too many parameters, before any of them is allocated.

    Args:
        count: how many, about.
        sizes: the entries that it follows from.
    """
    if count > MOST_PARAMETERS:
        given = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"a model may have at most {MOST_PARAMETERS:.0e} parameters, got about {count:.0e} with "
            f"{given}"
        )


def echo(value: object) -> str:
    """A value as an error message shows it: its repr, shortened.

    Python refuses the repr of huge integers, alone and in lists; their type stands for them.
    """
    try:
        text = repr(value)
    except ValueError:
        bits = f" of {value.bit_length()} bits" if isinstance(value, int) else ""
        return f"{type(value).__name__}{bits}"
    return text if len(text) <= 100 else f"{text[:97]}..."


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
