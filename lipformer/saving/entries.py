"""What the configs of all models share: a dataclass of plain values that a JSON file can hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

_C = TypeVar("_C", bound="ModelConfig")


@dataclass(frozen=True)
class ModelConfig:
    """The base of the configs; a dataclass itself, so that jsonargparse sees plain dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """All entries as JSON values."""
        entries = dataclasses.asdict(self)
        return {name: list(v) if isinstance(v, tuple) else v for name, v in entries.items()}

    @classmethod
    def from_dict(cls: type[_C], entries: Mapping[str, Any]) -> _C:
        """The config of :meth:`to_dict`'s entries.

        Raises:
            ValueError: an entry is unknown, missing or wrong; it says which.
        """
        try:
            return cls(**entries)
        except TypeError as error:
            raise ValueError(f"wrong entries for {cls.__name__}: {error}") from error

    def fill(self, **defaults: Any) -> None:
        """Puts a default in the place of each entry that is None."""
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def check_positive(self, *names: str) -> None:
        """ValueError unless these entries, or their numbers, are positive and finite, or None."""
        for name in names:
            given = getattr(self, name)
            for value in given if isinstance(given, tuple) else (given,):
                if value is not None and not 0 < value < math.inf:
                    raise ValueError(f"{name} must be positive and finite, got {given!r}")

    def check_choice(self, name: str, *allowed: str | None) -> None:
        """ValueError unless an entry is one of those allowed."""
        if getattr(self, name) not in allowed:
            known = ", ".join(map(str, allowed))
            raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")

    def check_foreign(self, variant: str, own: Mapping[str, Any], *names: str) -> None:
        """ValueError if an entry is given that the variant does not have, where it would do nothing."""
        for name in names:
            if name not in own and getattr(self, name) is not None:
                others = ", ".join(own) or "none"
                raise ValueError(
                    f"the variant {variant!r} has no option {name}, got {name}="
                    f"{getattr(self, name)!r}; beside those of all variants it has {others}"
                )
