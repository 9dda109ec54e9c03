"""The pages of docs/: their examples run, their tables are l2_gain's, their references exist."""

from __future__ import annotations

import importlib
import math
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from lipformer.functional import l2_gain

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): page for page in sorted(DOCS.rglob("*.md"))}
# Besides theory/ and api/; every other page has examples.
WITHOUT_EXAMPLES = {
    "faq.md",
    "gpu.md",
    "peers.md",
    "pictures.md",
    "release.md",
    "results.md",
    "security.md",
    "theory.md",
    "training.md",
    "tutorials/index.md",
}
LANGUAGES = {"python", "text"}

# Runs the page whose path it gets: all but the examples is blank, so that a traceback names the
# line of the page and shows it. UserWarnings are errors: a reader should not meet one.
RUN = """
import sys
path = sys.argv[1]
source, inside = [], False
for line in open(path, encoding="utf-8").read().split("\\n"):
    fence = line.startswith("```")
    inside = line == "```python" if fence else inside
    source.append(line if inside and not fence else "")
exec(compile("\\n".join(source), path, "exec"), {"__name__": "__main__"})
"""


def fences(page: Path) -> list[str]:
    """The language of each fenced block; fails on one that is not closed or not known."""
    marks = re.findall(r"^\s*```(.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    assert len(marks) % 2 == 0, f"{page.name}: a ``` fence is not closed"
    opened, closed = marks[::2], marks[1::2]
    assert set(opened) <= LANGUAGES, f"{page.name}: fences are of {LANGUAGES}, got {set(opened)}"
    assert not any(closed), f"{page.name}: a fence closes with {set(closed)}"
    return opened


def test_the_pages_are_there() -> None:
    assert {"theory.md", "theory/gain.md", "tutorials/certify.md"} <= set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_examples_run(name: str, tmp_path: Path) -> None:
    page = PAGES[name]
    examples = fences(page).count("python")
    if name in WITHOUT_EXAMPLES or name.startswith(("api/", "theory/")):
        assert not examples, f"{name} has examples now: take it off WITHOUT_EXAMPLES"
        return
    assert examples, f"{name} has no ```python block to run"
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", RUN, str(page)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, f"{name} failed:\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.name} links to {missing}"


def test_code_that_a_page_names_exists() -> None:
    found = 0
    for page, path in PAGES.items():
        references = re.findall(r"`(lipformer[\w.]*):(\w+)`", path.read_text(encoding="utf-8"))
        found += len(references) * page.startswith("theory/")
        for module, name in references:
            assert hasattr(importlib.import_module(module), name), f"{page}: {module}:{name}"
    assert found > 30, "the pages of theory/ name the code of their theorems"


# Column titles of the tables of docs/theory/gain.md and what l2_gain is asked for; "lower" holds for an
# even number of tokens, of which all but one stand on a line.
BY_LENGTH: dict[str, dict[str, Any]] = {
    "E (self)": {"norm": "self"},
    "closed": {"theorem": "closed"},
    "G": {"theorem": "G"},
    "closed causal": {"is_causal": True, "theorem": "closed"},
    "G causal": {"is_causal": True, "theorem": "G"},
    "G any mask": {"theorem": "any mask"},
    "D (token)": {"norm": "token"},
    "published": {"theorem": "kim2021"},
}
BY_SLOPE: dict[str, dict[str, Any]] = {
    "E (self)": {"norm": "self"},
    **{name: {"theorem": name} for name in ("closed", "G")},
    "D (token)": {"norm": "token"},
}


def table(title: str) -> list[dict[str, str]]:
    """The rows of the table of docs/theory/gain.md whose first column has this title."""
    lines = (DOCS / "theory" / "gain.md").read_text(encoding="utf-8").split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {title} |"))
    cells = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        cells.append([cell.strip() for cell in line.strip("|").split("|")])
    header, _, *rows = cells
    return [dict(zip(header, row, strict=True)) for row in rows]


def assert_rounded_up(shown: str, gain: float) -> None:
    unit = 10.0 ** -len(shown.partition(".")[2])
    assert gain <= float(shown) + 1e-9 <= gain + unit + 2e-9, (shown, gain)


def test_table_of_gains_by_length() -> None:
    rows = table("N")
    assert [row["N"] for row in rows] == ["16", "64", "256", "1024", "4096"]
    for row in rows:
        n = int(row.pop("N"))
        lower = l2_gain(n - 1, norm="self")
        assert lower - 0.01 <= float(row.pop("lower")) <= lower
        assert set(row) == set(BY_LENGTH)
        for name, shown in row.items():
            assert_rounded_up(shown, l2_gain(n, **BY_LENGTH[name]))


def test_table_of_gains_by_slope() -> None:
    rows = table("slope")
    assert [row["slope"] for row in rows] == ["1/2", "1/4", "1/8", "1/16", "1/32", "1/64"]
    for row in rows:
        slope = float(Fraction(row.pop("slope")))
        assert set(row) == set(BY_SLOPE)
        for name, shown in row.items():
            assert_rounded_up(shown, l2_gain(math.inf, is_causal=True, slope=slope, **BY_SLOPE[name]))
