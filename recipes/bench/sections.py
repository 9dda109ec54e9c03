"""Parts of a report: rows of named values, shown as tables and saved as JSON and Markdown."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

# rich takes 80 columns where it does not write to a terminal.
_PLAIN_WIDTH = 160


class Failure(str):
    """What is in the cell of something that failed and should not have."""


@dataclass(frozen=True)
class Section:
    """A title, what a reader must know, and rows that have the same keys; None: not measured."""

    title: str
    note: str
    rows: list[dict[str, Any]]

    def failed(self) -> bool:
        """Whether a cell holds a failure."""
        return any(isinstance(value, Failure) for row in self.rows for value in row.values())


def cell(value: Any) -> str:
    """A value as the tables show it."""
    if value is None:
        return "not measured"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show(section: Section) -> None:
    """Prints a section as a table."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    table = Table(title=escape(section.title))
    for name in section.rows[0]:
        table.add_column(escape(name), overflow="fold")
    for row in section.rows:
        table.add_row(*(escape(cell(value)) for value in row.values()))
    console.print(table)
    console.print(section.note, markup=False, highlight=False)


def as_markdown(section: Section) -> str:
    """A section as a heading, a note and a table."""
    rows = [list(section.rows[0]), *([cell(v) for v in row.values()] for row in section.rows)]
    lines = [
        "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in row) + " |" for row in rows
    ]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return f"## {section.title}\n\n{section.note}\n\n" + "\n".join(lines) + "\n"


def save(sections: list[Section], directory: Path, stem: str, title: str) -> list[Path]:
    """Writes all sections to STEM.json and STEM.md in a directory and returns the two."""
    document = json.dumps([asdict(section) for section in sections], indent=2) + "\n"
    text = "\n".join([f"# {title}\n", *map(as_markdown, sections)])
    paths = []
    for suffix, content in (("json", document), ("md", text)):
        path = directory / f"{stem}.{suffix}"
        path.write_text(content, encoding="utf-8")
        paths.append(path)
    return paths
