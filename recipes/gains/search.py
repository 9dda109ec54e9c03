"""Computes and verifies the table of Theorem G that lipformer ships.

    python -m recipes.gains.search            # searches, and writes lipformer/functional/gain/table.json
    python -m recipes.gains.search --verify   # evaluates every entry again, in interval arithmetic

x, E and lambda are free in the theorem. So the search may be rough: x and E are searched on samples for
some lengths and interpolated between them. An entry is what `theorem_g` and `corollary` prove for them,
rounded up.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
from collections.abc import Callable, Iterable, Sequence

import torch

from lipformer.functional.gain.row_factor import Cells
from lipformer.functional.gain.rows import theorem_e
from lipformer.functional.gain.table import TABLE, AnyBias, Entry, read_table
from lipformer.functional.gain.theorem_g import Mask, corollary, frobenius_factor, theorem_g

Point = tuple[float, float]

# Ratios B_c/B that lambda is chosen for; every lambda is valid for all of them.
RATIOS = [2.0**k for k in (-2, -1, 0, 1, 2, 3, 4, 6)]
# A slope that a float32 number rounds down must still find its entry.
BELOW = 1 - 1e-6


def geometric(low: float, high: float, per_octave: int) -> list[float]:
    """2^low, ..., 2^high."""
    return [2 ** (low + k / per_octave) for k in range(round((high - low) * per_octave) + 1)]


def lengths() -> list[float]:
    """The numbers of keys of the table."""
    spaced = geometric(6, 12, 16) + geometric(12, 24, 8)
    return sorted({*map(float, range(2, 65)), *(float(math.ceil(n - 1e-9)) for n in spaced)})


def slopes() -> list[float]:
    """The ALiBi slopes of the table, from steep to flat; the corollary is better for steeper ones."""
    return sorted({s * BELOW for s in geometric(-8, -2, 16) + geometric(-16, -8, 8)}, reverse=True)


def masses() -> list[float]:
    """The masses B of the corollary, with those of integers and of usual slopes among them."""
    spaced = geometric(-12, -3, 4) + geometric(-3, 7, 16) + geometric(7, 20, 8)
    usual = [1 / math.expm1(s * BELOW) for s in geometric(-8, 3, 4)]
    # A mass that is rounded up must still find its entry.
    return sorted({mass * (1 + 1e-9) for mass in (*spaced, *map(float, range(1, 65)), *usual)})


def rounded_up(value: float) -> float:
    """Seven digits, above by 1e-6 for what other versions of torch round differently."""
    return float(f"{value * (1 + 1e-6):.7g}")


def search(mask: Mask, starts: Iterable[Point], step: float) -> Point:
    """A good (ln x, ln E), by pattern search on samples."""
    cells = Cells(mask.mass, 60, 90, sampled=True)
    seen: dict[Point, float] = {}

    def gain(point: Point) -> float:
        if point not in seen:
            seen[point] = theorem_g(mask, math.exp(point[0]), math.exp(point[1]), cells)
        return seen[point]

    best = min(starts, key=gain)
    while step > 0.1:
        a, b = best
        best = min([best, (a + step / 2, b), (a - step / 2, b), (a, b + step), (a, b - step)], key=gain)
        if best == (a, b):
            step /= 2
    return best


def computed(
    mask_of: Callable[[float], Mask], keys: Sequence[float], nodes: Sequence[float]
) -> list[Entry]:
    """The entries for all keys (lengths or slopes, by growing gains), searched at the nodes."""
    found: list[tuple[float, Point]] = []
    starts: list[Point] = [(a, b) for a in (-0.4, 0.4) for b in (-5.0, -3.0, -1.0, 1.5)]
    for node in nodes:
        point = search(mask_of(node), starts, 1.0 if not found else 0.5)
        starts = [point, (-0.4, -1.0), (-0.4, -3.0)]
        found.append((math.log(node), point))
        print(mask_of(node), *map(math.exp, point), flush=True)
    found.sort()
    entries: list[Entry] = []
    for key in keys:
        place = bisect.bisect_left(
            found, math.log(key), lo=1, hi=len(found) - 1, key=lambda node: node[0]
        )
        (p, (a, b)), (q, (c, d)) = found[place - 1 : place + 1]
        weight = (math.log(key) - p) / (q - p)
        x, e = (float(f"{math.exp(v):.4g}") for v in (a + weight * (c - a), b + weight * (d - b)))
        entries.append(Entry(key, rounded_up(theorem_g(mask_of(key), x, e)), x, e))
        print(entries[-1], flush=True)
    # An entry above a later one is of no use: the later one is valid for it.
    return [e for i, e in enumerate(entries) if all(e.gain < later.gain for later in entries[i + 1 :])]


def any_bias(mass: float) -> AnyBias:
    """The lines lambda + B_c T of the corollary that are best for some B_c/B."""
    cells = Cells(mass)
    theta = frobenius_factor(cells)
    least = theorem_e(math.log(mass)) ** 2
    tried = least * (1 + torch.logspace(-5, 5, 600, dtype=torch.float64))
    values = corollary(cells, theta, tried)
    picked = sorted({int((tried + ratio * mass * values).argmin()) for ratio in RATIOS})
    lam = torch.tensor([float(f"{tried[i].item():.7g}") for i in picked], dtype=torch.float64)
    t = corollary(cells, theta, lam).tolist()
    print(mass, math.sqrt(min(a + mass * b for a, b in zip(lam.tolist(), t, strict=True))), flush=True)
    return AnyBias(mass, lam.tolist(), [rounded_up(value) for value in t])


def write() -> None:
    """Computes the table."""
    nodes = [2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, *geometric(6, 24, 1)]
    table: dict[str, Sequence[Entry] | Sequence[AnyBias]] = {
        "any": [any_bias(mass) for mass in masses()],
        "none": computed(lambda n: Mask("none", n - 1), lengths(), nodes),
        "causal": computed(lambda n: Mask("causal", n - 1), lengths(), nodes),
        "alibi": computed(
            lambda s: Mask("causal", 0, s), slopes(), [s * BELOW for s in geometric(-16, -2, 1)]
        ),
    }
    parts = (
        f'"{k}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]" for k, rows in table.items()
    )
    TABLE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def verify(stride: int = 1) -> list[float]:
    """Evaluates every ``stride``-th entry of the table; the ratios to the stored values, at most 1."""
    table, ratios = read_table(), []
    for kind, entries in (("none", table.none), ("causal", table.causal), ("alibi", table.alibi)):
        for entry in entries[::stride]:
            mask = Mask("causal", 0, entry.key) if kind == "alibi" else Mask(kind, entry.key - 1)
            ratios.append(theorem_g(mask, entry.x, entry.e) / entry.gain)
    for row in table.any[::stride]:
        cells = Cells(row.mass)
        values = corollary(cells, frobenius_factor(cells), torch.tensor(row.lam, dtype=torch.float64))
        ratios += (values / torch.tensor(row.t, dtype=torch.float64)).tolist()
    return ratios


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--verify", action="store_true", help="check the shipped table instead")
    torch.set_num_threads(1)
    if parser.parse_args().verify:
        ratios = verify()
        print(f"{len(ratios)} values, from {min(ratios):.9f} to {max(ratios):.9f} of what is stored")
        if not all(ratio <= 1 for ratio in ratios):
            raise SystemExit("an entry is smaller than what can be proved")
    else:
        write()
