"""Repeats the experiments of the papers and writes what came out beside what was published.

    python -m recipes.papers --quick               all of them, small: under 20 minutes on two cores
    python -m recipes.papers inversion tightness   two of them, at full size

Each leaves NAME.json, NAME.csv, NAME.png and NAME.md in OUT/LEVEL, and all together RESULTS.md there.
A finished part is not measured again: give the same command to go on. Exit code 1: a claim failed.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from recipes.output import exit_code, parser, usable_directory, write_text
from recipes.papers.experiment import Record, Setting
from recipes.papers.results import NAMES, experiment, results
from training.base_cli import prepare_process
from training.progress import print_plain


def run(names: Sequence[str], setting: Setting, out: Path) -> int:
    """Measures what is missing and writes everything; 1 if something was found to be wrong."""
    folder = usable_directory(out / setting.level, "--out")
    records = [Record(experiment(name), setting, folder) for name in names]
    total, begin = sum(len(record.missing) for record in records), time.time()
    wrong = False
    for record in records:
        for part in record.measure():
            left = sum(len(other.missing) for other in records)
            minutes = (time.time() - begin) / (total - left) * left / 60
            took = f"{record.measured[part.name]['seconds']:.0f} s"
            print_plain(f"{record.name}: {part.name}, {took}; {left} left, about {minutes:.0f} minutes")
        found = record.publish()
        wrong |= found.holds is False
        print_plain(f"{record.name}: {found.figure}. {found.text}")
    write_text(folder / "RESULTS.md", results(folder))
    print_plain(f"written to {folder}")
    return int(wrong)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    given = parser(__doc__)
    given.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all if none")
    level = given.add_mutually_exclusive_group()
    level.add_argument("--smoke", dest="level", action="store_const", const="smoke", help="seconds")
    level.add_argument("--quick", dest="level", action="store_const", const="quick", help="minutes")
    given.add_argument("--out", type=Path, default=Path("report/papers"), help="directory of all output")
    given.add_argument("--data", type=Path, help="has ptb/ and tinyshakespeare.txt; without: the hub")
    given.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    asked = given.parse_args(arguments)
    prepare_process()
    torch.set_num_threads(asked.threads)
    setting = Setting(asked.level or "full", asked.data)
    return exit_code(lambda: run(asked.names or NAMES, setting, asked.out))


if __name__ == "__main__":
    sys.exit(main())
