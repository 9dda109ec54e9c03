"""An experiment of a paper: parts that are measured once each, then a table, a figure and a finding.

A part that is finished is kept in NAME.json and not measured again; what is killed goes on with the
part that it was at.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from recipes.output import markdown, write_csv, write_text
from training.errors import BadInput
from training.progress import print_plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Level = Literal["smoke", "quick", "full"]
Row = dict[str, Any]
HELD = {True: "Holds", False: "**Does not hold**", None: "Not settled"}
MOST_BYTES = 200_000
"""Of a figure, as it is kept in the repository."""


@dataclass(frozen=True)
class Setting:
    """What a run may cost, and what it may read.

    Attributes:
        level: "smoke" (seconds), "quick" (under two minutes an experiment) or "full".
        data: a directory with ptb/ptb.*.txt and tinyshakespeare.txt; None for texts of the hub and,
            below "full", for documentation that comes with Python.
    """

    level: Level
    data: Path | None = None

    def pick(self, smoke: Any, quick: Any, full: Any) -> Any:
        """The one of three values that is meant for the level."""
        return {"smoke": smoke, "quick": quick, "full": full}[self.level]


@dataclass(frozen=True)
class Part:
    """What is measured in one go, in at most 45 minutes.

    Attributes:
        name: says what is measured, unique in its experiment.
        work: measures; takes a directory of its own, where a training run keeps its state.
        cost: what it takes beside the other parts, for the time that is left.
    """

    name: str
    work: Callable[[Path], Row | list[Row]]
    cost: float = 1.0


@dataclass(frozen=True)
class Finding:
    """What came out of an experiment.

    Attributes:
        holds: whether the claim was found to hold; None where too little was measured to say.
        figure: our figure in a few words.
        text: the setting, and where ours differs from what was published, why.
    """

    holds: bool | None
    figure: str
    text: str


@dataclass(frozen=True)
class Experiment:
    """A published experiment, or one of this project's own.

    Attributes:
        name: of its module and its files.
        title: the heading of its section.
        source: where it was published.
        claim: what is claimed there.
        caption: of the figure.
        parts: what is to be measured.
        table: the rows of its table, of all rows that were measured; a new table begins where the
            first column has another name.
        draw: draws the rows into a figure.
        judge: what came out.
    """

    name: str
    title: str
    source: str
    claim: str
    caption: str
    parts: Callable[[Setting], list[Part]]
    table: Callable[[list[Row]], list[Row]]
    draw: Callable[[list[Row], Figure], None]
    judge: Callable[[list[Row]], Finding]


@dataclass
class Clock:
    """Seconds that are left, by what finished parts took.

    Attributes:
        left: cost of the parts that are to come.
        done: cost of those that this run has measured.
        seconds: that these took.
    """

    left: float
    done: float = 0.0
    seconds: float = 0.0

    def tick(self, cost: float, seconds: float) -> str:
        """Counts a finished part; says what is left."""
        self.left, self.done, self.seconds = self.left - cost, self.done + cost, self.seconds + seconds
        minutes = max(0.0, self.left) * self.seconds / self.done / 60.0
        return f"{seconds:.0f} s; about {minutes:.1f} minutes left"


class Record:
    """The parts of an experiment that are measured, in a file.

    Args:
        experiment: whose.
        setting: what parts there are to be.
        out: directory of the level's files.
    """

    def __init__(self, experiment: Experiment, setting: Setting, out: Path) -> None:
        self.experiment, self.out = experiment, out
        self.parts = experiment.parts(setting)
        self._level = setting.level
        kept = read_record(out / f"{experiment.name}.json") if self._path.exists() else {}
        names = {part.name for part in self.parts}
        self.kept: dict[str, Any] = {k: v for k, v in kept.get("parts", {}).items() if k in names}

    @property
    def _path(self) -> Path:
        return self.out / f"{self.experiment.name}.json"

    @property
    def missing(self) -> list[Part]:
        """What is not measured yet."""
        return [part for part in self.parts if part.name not in self.kept]

    @property
    def rows(self) -> list[Row]:
        """What was measured, in the order of the parts."""
        return rows_of(
            {part.name: self.kept[part.name] for part in self.parts if part.name in self.kept}
        )

    def measure(self, clock: Clock) -> None:
        """Measures what is missing, and keeps each part as soon as it is finished."""
        for part in self.missing:
            begin = time.perf_counter()
            rows = part.work(self.out / "parts" / self.experiment.name / part.name.replace(" ", "_"))
            seconds = time.perf_counter() - begin
            rows = rows if isinstance(rows, list) else [rows]
            self.kept[part.name] = {"seconds": round(seconds, 2), "rows": rows}
            document = {
                "name": self.experiment.name,
                "level": self._level,
                "torch": torch.__version__,
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU was used",
                "missing": [part.name for part in self.missing],
                "parts": self.kept,
            }
            write_text(self._path, json.dumps(document, indent=1, allow_nan=False) + "\n")
            print_plain(
                f"{self.experiment.name}: {part.name} ({len(self.kept)} of {len(self.parts)} parts), "
                f"{clock.tick(part.cost, seconds)}"
            )

    def publish(self) -> Finding:
        """Writes NAME.csv, NAME.png and NAME.md of what was measured."""
        write_csv(self.out / f"{self.experiment.name}.csv", padded(self.rows))
        draw(self.experiment, self.rows, self.out / f"{self.experiment.name}.png")
        write_text(self.out / f"{self.experiment.name}.md", section(self.experiment, self.rows))
        return self.experiment.judge(self.rows)


def read_record(path: Path) -> dict[str, Any]:
    """The document of an experiment's JSON file."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        document["parts"].items(), len(document["missing"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadInput(f"{path} is not a record of an experiment ({error}); delete it") from error
    return document


def rows_of(parts: dict[str, Any]) -> list[Row]:
    """The rows of all parts."""
    return [row for part in parts.values() for row in part["rows"]]


def padded(rows: Sequence[Row]) -> list[Row]:
    """Rows that all have the keys of any."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name, "") for name in names} for row in rows]


def curves(
    rows: Iterable[Row], by: str, x: str, y: str, **only: Any
) -> Iterator[tuple[Any, list[Any], list[Any]]]:
    """A curve for each value of a column: its value, the xs in rising order, and the ys.

    Args:
        rows: of an experiment.
        by: the column that tells the curves apart.
        x, y: columns.
        only: values that other columns must have.
    """
    chosen = [row for row in rows if y in row and all(row.get(k) == v for k, v in only.items())]
    for value in dict.fromkeys(row[by] for row in chosen):
        points = sorted(((row[x], row[y]) for row in chosen if row[by] == value), key=lambda p: p[0])
        yield value, [p[0] for p in points], [p[1] for p in points]


def draw(experiment: Experiment, rows: list[Row], path: Path) -> None:
    """The figure, in lines that are told apart without colours, too."""
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.figure import Figure

    looks = cycler(
        color=["black", "tab:blue", "tab:orange", "tab:green", "tab:purple", "gray", "tab:red"]
    )
    looks += cycler(linestyle=["-", "--", "-.", ":", "-", "--", "-."])
    looks += cycler(marker=["o", "s", "^", "D", "v", "x", "+"])
    with mpl.rc_context({"axes.prop_cycle": looks, "lines.markersize": 4, "axes.grid": True}):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        experiment.draw(rows, figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, metadata={"Software": None})
    if path.stat().st_size > MOST_BYTES:
        raise BadInput(f"{path} has {path.stat().st_size} bytes, of at most {MOST_BYTES}")


def section(experiment: Experiment, rows: list[Row], pictures: str = "") -> str:
    """The experiment in Markdown: claim, figure, table, finding.

    Args:
        experiment: whose.
        rows: that were measured.
        pictures: what stands before the name of a picture: a directory and a slash.
    """
    found = experiment.judge(rows)
    tables = groupby(experiment.table(rows), lambda row: next(iter(row)))
    lines = [
        f"### {experiment.title}",
        f"{experiment.source}. Claimed: {experiment.claim}",
        f"![{experiment.title}]({pictures}{experiment.name}.png)",
        f"*{experiment.caption}*",
        *(markdown(padded(list(table))) for _, table in tables),
        f"{HELD[found.holds]}: {found.figure}. {found.text}",
    ]
    return "\n\n".join(lines) + "\n"
