"""Curves through rows of measurements, as figures and tables: means over seeds, and their range."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure

from lipformer.saving.saved_model import atomic_write

Row = dict[str, Any]
Rows = Iterable[Row]
COLORS = ["black", *(f"tab:{name}" for name in ("blue", "orange", "green", "purple", "gray", "red"))]
LOOKS = cycler(marker=list("os^Dvx+"), linestyle=["-", "--", "-.", ":", "-", "--", "-."], color=COLORS)
STYLE: Any = {"axes.prop_cycle": LOOKS, "lines.markersize": 4, "axes.grid": True, "legend.fontsize": 7}


class Mean(float):
    """The mean of some seeds, which knows the lowest and the highest of them."""

    low: float
    high: float

    def __new__(cls, values: Sequence[float]) -> "Mean":
        mean = super().__new__(cls, fmean(values))
        mean.low, mean.high = (mean, mean) if math.isnan(mean) else (min(values), max(values))
        return mean

    def __str__(self) -> str:
        spread = f" ({self.low:.4g} to {self.high:.4g})" if self.low < self.high else ""
        return f"{self:.4g}{spread}"


def curves(rows: Rows, x: str, y: str, by: str = "", **only: Any) -> dict[Any, dict[Any, Mean]]:
    """The mean of y at each x, a curve for each value of `by`; NaN where training diverged.

    Other columns must have the values of `only`, one or a tuple of several. Rows without y are left out.
    """
    found: dict[Any, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        value = row.get(y, math.nan if row.get("diverged") else None)
        wanted = (row.get(k) in (v if isinstance(v, tuple) else (v,)) for k, v in only.items())
        if value is not None and all(wanted):
            found[row.get(by)][row.get(x)].append(value)
    return {name: {x: Mean(seeds) for x, seeds in points.items()} for name, points in found.items()}


class Panel(NamedTuple):
    """Curves in one pair of axes; bars where seeds differ, a level line for rows without x.

    x, by and only are as in `curves`, y may be several columns with their labels, and log names the axes
    that go by powers. Panels that all have one ylabel share that axis.
    """

    x: str
    y: str | dict[str, str]
    by: str = ""
    only: Row = {}  # noqa: RUF012
    log: str = ""
    xlabel: str = ""
    ylabel: str = ""
    title: str = ""

    def curves(self, rows: Rows) -> dict[str, dict[Any, Mean]]:
        """The curves by label."""
        found = {}
        for column, label in (self.y if isinstance(self.y, dict) else {self.y: ""}).items():
            one: dict[Any, dict[Any, Mean]] = {} if self.by else {None: {}}  # keeps a missing one's look
            for name, points in (one | curves(rows, self.x, column, self.by, **self.only)).items():
                value = f"{self.by} {name}" if isinstance(name, (int, float)) else name
                found[", ".join(filter(None, (value, label))) or column] = points
        return found

    def table(self, rows: Rows) -> list[Row]:
        """The curves as lines of a table, empty where one has no point."""
        found = self.curves(rows)
        every = dict.fromkeys(x for points in found.values() for x in points)
        return [
            {self.xlabel: label, **{str(x): str(points.get(x, "")) for x in every}}
            for label, points in found.items()
        ]

    def plot(self, axes: Any, rows: Rows) -> None:
        """Draws the curves, and a legend above the axes, where it covers no point."""
        for label, points in self.curves(rows).items():
            if None in points:
                axes.axhline(points[None], color="gray", label=label)
                continue
            x, means = list(points), list(points.values())
            (line,) = axes.plot(x, means, label=label, markevery=len(x) // 8 or 1)
            axes.vlines(x, [y.low for y in means], [y.high for y in means], color=line.get_color())
            if any(isinstance(name, str) for name in x):
                axes.tick_params("x", rotation=90)
        axes.set(xlabel=self.xlabel, ylabel=self.ylabel, **{f"{axis}scale": "log" for axis in self.log})
        axes.legend(title=self.title or None, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def draw(panels: Sequence[Panel], rows: Sequence[Row], path: Path) -> None:
    """The panels that have rows, side by side, in lines that are told apart without colours, too."""
    told = [panel for panel in panels if any(panel.curves(rows).values())]
    share = len({panel.ylabel for panel in told}) == 1
    with mpl.rc_context(STYLE), atomic_write(path) as part:
        figure = Figure(figsize=(max(8.0, 2.8 * len(told)), 4.2), layout="constrained")
        grid = figure.subplots(1, len(told), sharey=share, squeeze=False)[0]
        for axes, panel in zip(grid, told, strict=True):
            panel.plot(axes, rows)
        figure.savefig(part, dpi=110, metadata={"Software": None})
