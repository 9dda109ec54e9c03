"""What recipes share: options, tables, files that are written whole, and errors in one line."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lipformer.saving.saved_model import atomic_write
from training.errors import exit_code as exit_code
from training.errors import usable_directory as usable_directory

Rows = Sequence[Mapping[str, Any]]


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The description line by line, and the default of every option."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's header and all options with their defaults."""
    return argparse.ArgumentParser(description=description, formatter_class=_Help)


def write_text(path: Path, text: str) -> None:
    """A text file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, document: Any) -> None:
    """A document as JSON, and a line that says where."""
    write_text(path, json.dumps(document, indent=2) + "\n")
    print(f"written to {path}")


def write_csv(path: Path, rows: Rows) -> None:
    """A table as CSV, with the columns of all rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def _cell(value: Any) -> str:
    if value is None:
        return "not measured"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show(rows: Rows, title: str = "") -> None:
    """Prints rows that have the same keys as a table."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # not the 80 columns that rich takes there
    table = Table(*map(escape, rows[0]), title=escape(title))
    for row in rows:
        table.add_row(*(escape(_cell(value)) for value in row.values()))
    console.print(table)


def markdown(rows: Rows) -> str:
    """The same rows as a table in Markdown."""
    cells = [list(rows[0]), *(map(_cell, row.values()) for row in rows)]
    lines = [
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
        for row in cells
    ]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
