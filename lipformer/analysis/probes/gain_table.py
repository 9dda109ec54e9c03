"""A tidy table of local gains, and how they grow."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from lipformer.saving.saved_model import atomic_write


@dataclass(frozen=True)
class GainRow:
    """The gain of one attention layer at one sequence.

    Attributes:
        sequence: number of the sequence.
        layer: path of the layer.
        index: number of the layer.
        n: tokens.
        radius: largest Euclidean norm of a token that enters the layer.
        gain: largest singular value of the Jacobian found (a lower estimate, see `converged`).
        bound: upper bound on it at this input; None where it was not asked for or there is none.
        products: products with the Jacobian that the estimate took.
        converged: whether the estimate met its tolerance.
    """

    sequence: int
    layer: str
    index: int
    n: int
    radius: float
    gain: float
    bound: float | None
    products: int
    converged: bool


@dataclass(frozen=True)
class Exponent:
    r"""The fit :math:`\text{gain} \approx C\,n^p` of one layer.

    Attributes:
        layer: path of the layer.
        index: number of the layer.
        exponent: p.
        error: standard error of p; nan for two rows.
        factor: C.
        rows: rows that were fitted.
    """

    layer: str
    index: int
    exponent: float
    error: float
    factor: float
    rows: int


@dataclass(frozen=True)
class GainTable:
    """Gains of attention layers, one row for each sequence and layer.

    Attributes:
        rows: the rows.
    """

    rows: tuple[GainRow, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        """A line for each layer: its sequences, and the ranges of n and of the gains."""
        lines = [f"GainTable of {len(self.rows)} gains"]
        for index, layer in self.layers():
            rows = self._of(index, layer)
            n, gains = [row.n for row in rows], [row.gain for row in rows]
            lines.append(
                f"{index} {layer}: {len(rows)} sequences, n {min(n)}..{max(n)}, "
                f"gain {min(gains):.4g}..{max(gains):.4g}"
            )
        return "\n".join(lines)

    def _of(self, index: int, layer: str) -> list[GainRow]:
        return [row for row in self.rows if (row.index, row.layer) == (index, layer)]

    def layers(self) -> list[tuple[int, str]]:
        """Number and path of each layer."""
        return sorted({(row.index, row.layer) for row in self.rows})

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`."""
        import pandas  # type: ignore[import-untyped]

        names = [field.name for field in fields(GainRow)]
        return pandas.DataFrame([asdict(row) for row in self.rows], columns=names)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes the rows with a header; the file appears when it is whole. Directories are made."""
        with atomic_write(path) as part, part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(GainRow)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in self.rows)

    def exponents(self, against: str = "n") -> list[Exponent]:
        r"""Least squares :math:`\log\text{gain} = \log C + p \log n` for each layer.

        Args:
            against: "n", or "radius" for the growth with the largest token.

        Raises:
            ValueError: where a layer has fewer than two different values to fit, or a gain is zero.
        """
        return [self._fit(index, layer, against) for index, layer in self.layers()]

    def _fit(self, index: int, layer: str, against: str) -> Exponent:
        rows = self._of(index, layer)
        if min(min(row.gain, getattr(row, against)) for row in rows) <= 0:
            raise ValueError(f"{layer}: a gain or radius of zero has no logarithm")
        u = [math.log(getattr(row, against)) for row in rows]
        slope, error, intercept = _least_squares(u, [math.log(row.gain) for row in rows], layer, against)
        return Exponent(layer, index, slope, error, math.exp(intercept), len(rows))

    def plot(self, path: str | os.PathLike[str], title: str = "") -> None:
        """Gain against n and against the radius, both logarithmic, as a picture.

        With the fit of each layer that has sequences of two lengths. Directories are made.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 5), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        total = max(len(self.layers()) - 1, 1)
        for place, (index, layer) in enumerate(self.layers()):
            rows, colour = self._of(index, layer), _colour(place / total)
            gains = [row.gain for row in rows]
            left.plot([row.n for row in rows], gains, ".", color=colour, markersize=3, alpha=0.5)
            right.plot([row.radius for row in rows], gains, ".", color=colour, markersize=4, alpha=0.6)
            ends = [min(row.n for row in rows), max(row.n for row in rows)]
            if ends[0] == ends[1]:
                left.plot([], [], color=colour, linewidth=1.5, label=f"{index} {layer}")
                continue
            fit = self._fit(index, layer, "n")
            line = [fit.factor * n**fit.exponent for n in ends]
            label = f"{index} {layer}: {fit.exponent:.2f} ± {fit.error:.2f}"
            left.plot(ends, line, color=colour, linewidth=1.5, label=label)
        ends = [min(row.n for row in self.rows), max(row.n for row in self.rows)]
        low = min(row.gain for row in self.rows)
        left.plot(ends, [low * (n / ends[0]) ** 0.5 for n in ends], "k--", linewidth=1, label="n^0.5")
        left.set(xscale="log", yscale="log", xlabel="tokens n", ylabel="local gain of attention")
        right.set(xscale="log", xlabel="largest token norm")
        left.legend(fontsize=7, title="layer: exponent fitted to n")
        figure.suptitle(title)
        with atomic_write(path) as part:
            figure.savefig(part, dpi=150)


def _least_squares(
    u: Sequence[float], v: Sequence[float], layer: str, against: str
) -> tuple[float, float, float]:
    """Slope, its standard error and intercept of v against u."""
    count = len(u)
    centre, height = sum(u) / count, sum(v) / count
    spread = sum((a - centre) ** 2 for a in u)
    # Values that differ by rounding alone are one value.
    if spread <= count * (1e-9 * max(1.0, abs(centre))) ** 2:
        raise ValueError(
            f"{layer}: a fit needs two different values of {against}, got {math.exp(centre):.6g}"
        )
    slope = sum((a - centre) * (b - height) for a, b in zip(u, v, strict=True)) / spread
    intercept = height - slope * centre
    rest = sum((b - intercept - slope * a) ** 2 for a, b in zip(u, v, strict=True))
    error = math.sqrt(rest / (count - 2) / spread) if count > 2 else math.nan
    return slope, error, intercept


def _colour(share: float) -> tuple[float, float, float]:
    """From blue (first layer) over grey to red (last), legible in print."""
    return (0.1 + 0.75 * share, 0.25 + 0.3 * (1 - abs(2 * share - 1)), 0.8 - 0.7 * share)
