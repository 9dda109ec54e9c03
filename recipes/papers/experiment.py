"""An experiment of a paper: parts that are measured once each, then a table, a figure and a finding.

It is a module of this folder; README.md says what it has.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch

from recipes.figures import Panel as Panel
from recipes.figures import Row as Row
from recipes.figures import Rows as Rows
from recipes.figures import curves as curves
from recipes.figures import draw
from recipes.output import markdown, write_csv, write_text
from training.errors import BadInput

HELD = {True: "Holds", False: "**Does not hold**", None: "Not settled"}


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
    """Rows of work(*args, directory), in at most 45 minutes; a training keeps its state there."""

    name: str
    work: Callable[..., Rows]
    args: tuple[Any, ...]


class Finding(NamedTuple):
    """Whether the claim holds (None: not settled), our figure in a few words, the setting and why."""

    holds: bool | None
    figure: str
    text: str


def header(experiment: ModuleType) -> tuple[str, str, str, str]:
    """Source, title, claim and caption, from the docstring of its module."""
    first, claim, caption, *_ = (" ".join(p.split()) for p in str(experiment.__doc__).split("\n\n"))
    source, _, title = first.partition(": ")
    return source, title.rstrip("."), claim, caption


def section(experiment: ModuleType, rows: list[Row], picture: str) -> str:
    """The experiment in Markdown: claim, figure (of that address), tables, finding."""
    source, title, claim, caption = header(experiment)
    found = experiment.judge(rows)
    lines = [f"### {title}", f"{source}. Claimed: {claim}", f"![{title}]({picture})", f"*{caption}*"]
    tables = [panel.table(rows) for panel in getattr(experiment, "TABLES", ())]
    lines += [markdown(table) for table in tables if table]
    return "\n\n".join([*lines, f"{HELD[found.holds]}: {found.figure}. {found.text}\n"])


class Record:
    """The parts of an experiment that are measured, in NAME.json of a level's directory."""

    def __init__(self, experiment: ModuleType, setting: Setting, out: Path) -> None:
        self.experiment, self.name = experiment, experiment.__name__.rpartition(".")[2]
        self.parts, self.path = experiment.parts(setting), out / f"{self.name}.json"
        self.setting = {"level": setting.level, "data": setting.data is not None}
        document: Row = read_record(self.path) if self.path.exists() else {"parts": {}}
        if other := [key for key, now in self.setting.items() if document.get(key, now) != now]:
            raise BadInput(f"{self.path} was measured with another {other[0]}: move it, or give that")
        self.measured: Row = document["parts"]

    @property
    def missing(self) -> list[Part]:
        """What is not measured yet."""
        return [part for part in self.parts if part.name not in self.measured]

    def measure(self) -> Iterator[Part]:
        """Measures what is missing, and keeps each part as soon as it is finished."""
        for part in self.missing:
            begin = time.perf_counter()
            folder = self.path.parent / "parts" / self.name / part.name.replace(" ", "_")
            rows = list(part.work(*part.args, folder))
            self.measured[part.name] = {"seconds": round(time.perf_counter() - begin, 2), "rows": rows}
            document: Row = {"name": self.name, **self.setting, "torch": torch.__version__}
            document["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, no GPU was used"
            document |= {"missing": [part.name for part in self.missing], "parts": self.measured}
            write_text(self.path, json.dumps(document, indent=1, allow_nan=False) + "\n")
            yield part

    def publish(self) -> Finding:
        """Writes NAME.csv, NAME.png and NAME.md of what was measured."""
        rows = rows_of(self.measured)
        write_csv(self.path.with_suffix(".csv"), rows)
        draw(self.experiment.PANELS, rows, self.path.with_suffix(".png"))
        write_text(self.path.with_suffix(".md"), section(self.experiment, rows, f"{self.name}.png"))
        return self.experiment.judge(rows)


def read_record(path: Path) -> Row:
    """The document of an experiment's JSON file."""
    try:
        document: Row = json.loads(path.read_text(encoding="utf-8"))
        rows_of(document["parts"]), len(document["missing"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadInput(f"{path} is not a record of an experiment ({error}); delete it") from error
    return document


def rows_of(parts: Row) -> list[Row]:
    """The rows of all parts."""
    return [row for part in parts.values() for row in part["rows"]]
