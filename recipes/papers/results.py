"""Writes RESULTS.md from the JSON files of the experiments.

python -m recipes.papers.results docs/results RESULTS.md
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from recipes.output import exit_code, markdown, parser, write_text
from recipes.papers.experiment import HELD, Experiment, read_record, rows_of, section
from training.errors import BadInput

NAMES = (
    "divergence",
    "tightness",
    "inversion",
    "treebank",
    "depth",
    "ranges",
    "smoothness",
    "sensitivity",
    "constants",
    "peers",
)
"""The experiments, in the order in which they are told."""

_INTRODUCTION = """# Results

Written by `python -m recipes.papers.results` from the JSON files beside the pictures, never by hand.
`make reproduce` measures all of it in small (under 20 minutes on two cores), `make reproduce-full` as it
stands here; one experiment alone is `python -m recipes.papers NAME`. What was measured on other data or
for longer stands in the README of its recipe: [vision](recipes/vision/README.md),
[texts](recipes/classify/README.md), [sets](recipes/sets/README.md), [flows](recipes/flows/README.md),
[particles](recipes/flows/particles/README.md), [series](recipes/series/README.md),
[Penn Treebank](recipes/ptb/README.md).
"""

_NOT_CLAIMED = """## What is not claimed

- Nothing here was measured on a GPU: all runs are of two CPU cores, speeds are ratios within one run.
- Models and texts are small: widths of 64 to 256, some hundred updates. Differences between variants may
  change with size and time.
- Published figures without a page number are quoted from memory of the papers.
- Bounds are proven in docs/theory.md; the attacks look for mistakes, they prove nothing.
"""


def experiment(name: str) -> Experiment:
    """The experiment of a module of this folder."""
    if name not in NAMES:
        raise BadInput(f"experiments are {', '.join(NAMES)}, got {name!r}")
    found: Experiment = import_module(f"recipes.papers.{name}").EXPERIMENT
    return found


def results(folder: Path, pictures: str = "") -> str:
    """The whole page.

    Args:
        folder: holds the JSON files.
        pictures: what stands before the names of pictures on the page.
    """
    overview, sections, missing = [], [], []
    for name in NAMES:
        path = folder / f"{name}.json"
        document = read_record(path) if path.exists() else {}
        if document.get("missing", True):
            missing.append(name)
            continue
        told, rows = experiment(name), rows_of(document["parts"])
        found = told.judge(rows)
        level = "" if document["level"] == "full" else f" --{document['level']}"
        command = f"python -m recipes.papers {name}{level}"
        minutes = sum(part["seconds"] for part in document["parts"].values()) / 60.0
        overview.append(
            {
                "source": told.source,
                "claim": told.claim,
                "": HELD[found.holds],
                "here": found.figure,
                "command": f"`{command}`",
            }
        )
        sections.append(
            f"{section(told, rows, pictures)}\n`{command}`, {minutes:.1f} minutes, "
            f"torch {document['torch']}, {document['machine']}.\n"
        )
    if not overview:
        raise BadInput(f"{folder} has no record of an experiment: run python -m recipes.papers")
    left = f"Not measured yet: {', '.join(missing)}.\n\n" if missing else ""
    table = markdown(overview)
    return "\n".join(
        [_INTRODUCTION, f"{table}\n\n{left}## The experiments\n", "\n".join(sections), _NOT_CLAIMED]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    given = parser(__doc__)
    given.add_argument("folder", type=Path, help="holds the JSON files and pictures")
    given.add_argument("page", type=Path, help="the page to write")
    asked = given.parse_args(arguments)

    def work() -> None:
        pictures = Path(os.path.relpath(asked.folder, asked.page.parent)).as_posix() + "/"
        write_text(asked.page, results(asked.folder, pictures))

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
