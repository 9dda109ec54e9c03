"""Writes RESULTS.md from the JSON files of the experiments.

python -m recipes.papers.results docs/results RESULTS.md
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from recipes.output import exit_code, markdown, parser, write_text
from recipes.papers.experiment import HELD, Row, header, read_record, rows_of, section
from training.errors import BadInput

NAMES = ["divergence", "tightness", "inversion", "treebank", "depth", "ranges", "smoothness"]
NAMES += ["sensitivity", "constants", "peers"]
"""The experiments, in the order in which they are told."""


def experiment(name: str) -> ModuleType:
    """The module of an experiment."""
    if name not in NAMES:
        raise BadInput(f"experiments are {', '.join(NAMES)}, got {name!r}")
    return import_module(f"recipes.papers.{name}")


def results(folder: Path, pictures: str = "") -> str:
    """The whole page of the records in a folder; pictures: what stands before the names of pictures."""
    overview, sections, missing = [], [], []
    for name in NAMES:
        path = folder / f"{name}.json"
        document: Row = read_record(path) if path.exists() else {"missing": True}
        if document["missing"]:
            missing.append(name)
            continue
        told, rows = experiment(name), rows_of(document["parts"])
        (source, _, claim, _), found = header(told), told.judge(rows)
        overview.append({"source": source, "claim": claim, "": HELD[found.holds], "here": found.figure})
        command = f"{name} --{document['level']}".removesuffix(" --full")
        minutes = sum(part["seconds"] for part in document["parts"].values()) / 60.0
        took = f"{minutes:.1f} minutes, torch {document['torch']}, {document['machine']}"
        text = section(told, rows, f"{pictures}{name}.png")
        sections.append(f"{text}\n`python -m recipes.papers {command}`, {took}.\n")
    if not overview:
        raise BadInput(f"{folder} has no record of an experiment: run python -m recipes.papers")
    summary = markdown(overview) + (f"\n\nNot measured yet: {', '.join(missing)}." if missing else "")
    page = Path(__file__).with_name("page.md").read_text(encoding="utf-8")
    return page.format(summary=summary, sections="\n".join(sections))


if __name__ == "__main__":
    given = parser(__doc__)
    given.add_argument("folder", type=Path, help="holds the JSON files and pictures")
    given.add_argument("page", type=Path, help="the page to write")
    asked = given.parse_args()
    near = Path(os.path.relpath(asked.folder, asked.page.parent)).as_posix()
    sys.exit(exit_code(lambda: write_text(asked.page, results(asked.folder, f"{near}/"))))
