"""An experiment of a paper: parts that are measured once each, then a table, a figure and a finding.

It is a module of this folder. Its docstring has the source and the title, the claim, and the caption of
the figure, a paragraph each. parts(setting) lists what to measure, PANELS the curves of the figure,
judge(rows) says what came out, and table(rows), if there is one, has the lines of the tables: a new one
begins where the first column has another name.
"""

import json
import math
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import torch
from cycler import cycler
from matplotlib.figure import Figure

from recipes.output import markdown, write_csv, write_text
from training.errors import BadInput

Row = dict[str, Any]
Rows = Iterable[Row]
HELD = {True: "Holds", False: "**Does not hold**", None: "Not settled"}
COLORS = ["black", *(f"tab:{name}" for name in ("blue", "orange", "green", "purple", "gray", "red"))]
LOOKS = cycler(marker=list("os^Dvx+"), linestyle=["-", "--", "-.", ":", "-", "--", "-."], color=COLORS)


class Setting(NamedTuple):
    """What a run may cost, and a directory with ptb/ptb.*.txt and tinyshakespeare.txt.

    Without data, texts are of the hub or, below "full", documentation that comes with Python.
    """

    level: Literal["smoke", "quick", "full"]
    data: Path | None = None

    def pick(self, smoke: Any, quick: Any, full: Any) -> Any:
        """The one of three values that is meant for the level."""
        return {"smoke": smoke, "quick": quick, "full": full}[self.level]


class Part(NamedTuple):
    """Rows of work(*args, directory), measured in one go of at most 45 minutes.

    A training run keeps its state in the directory; cost is beside the other parts.
    """

    name: str
    work: Callable[..., Rows]
    args: tuple[Any, ...]
    cost: float = 1.0


class Finding(NamedTuple):
    """Whether the claim holds (None: not settled), our figure in a few words, the setting and why."""

    holds: bool | None
    figure: str
    text: str


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

    def place(point: Any) -> Any:
        return point if isinstance(point, (int, float)) else 0

    return {k: {p: Mean(points[p]) for p in sorted(points, key=place)} for k, points in found.items()}


def pivot(rows: Rows, by: str, across: str, value: str, head: str = "{}", **only: Any) -> list[Row]:
    """A table of means: a line for each value of a column, a cell for each value of another one."""
    return [
        {by: name, **{head.format(x): str(mean) for x, mean in points.items()}}
        for name, points in curves(rows, across, value, by, **only).items()
    ]


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
                found[", ".join(filter(None, (value, label)))] = points
        return found


def _plot(axes: Any, label: str, points: dict[Any, Mean]) -> None:
    if None in points:
        axes.axhline(points[None], color="gray", label=label)
        return
    (line,) = axes.plot(
        list(points), list(points.values()), label=label, markevery=len(points) // 8 or 1
    )
    for x, mean in points.items():
        axes.vlines(x, mean.low, mean.high, color=line.get_color())
        axes.tick_params("x", rotation=90 if isinstance(x, str) else 0)


def draw(panels: Sequence[Panel], rows: list[Row], path: Path) -> None:
    """The panels that have rows, side by side, in lines that are told apart without colours, too."""
    told = [(panel, found) for panel in panels if any((found := panel.curves(rows)).values())]
    share, before = len({panel.ylabel for panel, _ in told}) == 1, [""]
    with mpl.rc_context({"axes.prop_cycle": LOOKS, "lines.markersize": 4, "axes.grid": True}):
        figure = Figure(figsize=(max(8.0, 2.8 * len(told)), 4.2), layout="constrained")
        grid = figure.subplots(1, len(told), sharey=share, squeeze=False)[0]
        for axes, (panel, found) in zip(grid, told, strict=True):
            for label, points in found.items():
                _plot(axes, label, points)
            axes.set(xlabel=panel.xlabel, **{f"{axis}scale": "log" for axis in panel.log})
            axes.set_ylabel(panel.ylabel if axes is grid[0] or not share else "")
            if list(found) in (before, [""]):
                axes.set_title(panel.title)
            else:  # above the axes, where it covers no point
                place: Row = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
                axes.legend(title=panel.title or None, fontsize=7, **place)
            before = list(found)
        figure.savefig(path, dpi=110, metadata={"Software": None})


def header(experiment: ModuleType) -> tuple[str, str, str, str]:
    """Source, title, claim and caption, from the docstring of its module."""
    first, claim, caption, *_ = (" ".join(p.split()) for p in str(experiment.__doc__).split("\n\n"))
    source, _, title = first.partition(": ")
    return source, title.rstrip("."), claim, caption


def section(experiment: ModuleType, rows: list[Row], picture: str) -> str:
    """The experiment in Markdown: claim, figure (of that address), table, finding."""
    (source, title, claim, caption), found = header(experiment), experiment.judge(rows)
    tables = groupby(getattr(experiment, "table", list)(rows), lambda line: next(iter(line)))
    lines = [f"### {title}", f"{source}. Claimed: {claim}", f"![{title}]({picture})", f"*{caption}*"]
    lines += [markdown(padded(list(table))) for _, table in tables]
    return "\n\n".join([*lines, f"{HELD[found.holds]}: {found.figure}. {found.text}"]) + "\n"


class Record:
    """The parts of an experiment that are measured, in NAME.json of a level's directory."""

    def __init__(self, experiment: ModuleType, setting: Setting, out: Path) -> None:
        self.experiment, self.level, self.out = experiment, setting.level, out
        self.name, self.parts = experiment.__name__.rpartition(".")[2], experiment.parts(setting)
        self._kept = read_record(self._file("json"))["parts"] if self._file("json").exists() else {}

    def _file(self, kind: str) -> Path:
        return self.out / f"{self.name}.{kind}"

    @property
    def missing(self) -> list[Part]:
        """What is not measured yet."""
        return [part for part in self.parts if part.name not in self._kept]

    @property
    def measured(self) -> Row:
        """What is measured, in the order of the parts."""
        return {part.name: self._kept[part.name] for part in self.parts if part.name in self._kept}

    def measure(self) -> Iterator[Part]:
        """Measures what is missing, and keeps each part as soon as it is finished."""
        for part in self.missing:
            begin = time.perf_counter()
            folder = self.out / "parts" / self.name / part.name.replace(" ", "_")
            rows = list(part.work(*part.args, folder))
            seconds = round(time.perf_counter() - begin, 2)
            self._kept[part.name] = {"seconds": seconds, "rows": rows}
            document: Row = {"name": self.name, "level": self.level, "torch": torch.__version__}
            document["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, no GPU was used"
            document["missing"] = [part.name for part in self.missing]
            document["parts"] = self.measured
            write_text(self._file("json"), json.dumps(document, indent=1, allow_nan=False) + "\n")
            yield part

    def publish(self) -> Finding:
        """Writes NAME.csv, NAME.png and NAME.md of what was measured."""
        rows = rows_of(self.measured)
        write_csv(self._file("csv"), padded(rows))
        draw(self.experiment.PANELS, rows, self._file("png"))
        write_text(self._file("md"), section(self.experiment, rows, f"{self.name}.png"))
        found: Finding = self.experiment.judge(rows)
        return found


def read_record(path: Path) -> Row:
    """The document of an experiment's JSON file."""
    try:
        document: Row = json.loads(path.read_text(encoding="utf-8"))
        document["parts"].items(), len(document["missing"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadInput(f"{path} is not a record of an experiment ({error}); delete it") from error
    return document


def rows_of(parts: Row) -> list[Row]:
    """The rows of all parts."""
    return [row for part in parts.values() for row in part["rows"]]


def padded(rows: Sequence[Row]) -> list[Row]:
    """Rows that all have the keys of any, empty where there is no value."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: "" if row.get(name) is None else row[name] for name in names} for row in rows]
