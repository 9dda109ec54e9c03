"""The table of Theorem G that recipes/gains has computed, and its use between the entries."""

from __future__ import annotations

import bisect
import functools
import json
import math
from pathlib import Path
from typing import NamedTuple

from lipformer.functional.gain.rows import log_mass
from lipformer.functional.rounding import enlarge

TABLE = Path(__file__).with_name("table.json")


class Entry(NamedTuple):
    """The gain that `theorem_g` proves for a number of keys or an ALiBi slope, with its x and E."""

    key: float
    gain: float
    x: float
    e: float


class AnyBias(NamedTuple):
    """Lines of the corollary for a mass B: G^2 <= lam + B_c t for each pair."""

    mass: float
    lam: list[float]
    t: list[float]


class Table(NamedTuple):
    """All entries; `none` and `causal` by growing number of keys, `alibi` by falling slope."""

    any: list[AnyBias]
    none: list[Entry]
    causal: list[Entry]
    alibi: list[Entry]


@functools.cache
def read_table() -> Table:
    """Reads the table, once."""
    data = json.loads(TABLE.read_text(encoding="utf-8"))
    entries = ([Entry(*row) for row in data[kind]] for kind in ("none", "causal", "alibi"))
    return Table([AnyBias(*row) for row in data["any"]], *entries)


def tabulated_gain(keys: float, is_causal: bool, slope: float = 0.0) -> float:
    """Theorem G without a mask, or causal with a window or ALiBi; infinite beyond the table.

    Rows and masses enter the theorem as upper bounds only, and ALiBi's bound falls with the slope. So
    the value of the next larger number of keys, or of the next smaller slope, is valid.

    Args:
        keys: Number of keys that a row sees, its own included; may be ``math.inf``.
        is_causal: Whether later keys are hidden.
        slope: ALiBi slope, 0 for none.
    """
    table = read_table()
    mass = enlarge(math.exp(log_mass(keys, slope))) if slope else keys - 1
    by_length = table.causal if is_causal else table.none
    return min(
        tabulated_any(mass, mass),
        _next(by_length, bisect.bisect_left(by_length, keys, key=lambda entry: entry.key)),
        _next(table.alibi, bisect.bisect_left(table.alibi, -slope, key=lambda entry: -entry.key)),
    )


def _next(entries: list[Entry], place: int) -> float:
    return entries[place].gain if place < len(entries) else math.inf


def tabulated_any(mass: float, column_mass: float) -> float:
    r"""The corollary of Theorem G: :math:`\sqrt{\lambda + B_c T}` with T of the next larger mass B.

    Args:
        mass: B, an upper bound on the rows' masses.
        column_mass: :math:`B_c`, an upper bound on the columns' masses, both without the own key.
    """
    rows = read_table().any
    place = bisect.bisect_left(rows, mass, key=lambda row: row.mass)
    if place == len(rows):
        return math.inf
    lines = zip(rows[place].lam, rows[place].t, strict=True)
    return enlarge(math.sqrt(min(lam + column_mass * t for lam, t in lines)))
