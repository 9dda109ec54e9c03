"""The table of all variants from the runs of recipes/ptb.

    python -m recipes.ptb.table runs/ptb/small

reads every run below the directory (VARIANT/0, VARIANT/1, ...: one for each seed) and prints a Markdown
table: the mean over the seeds with its smallest and largest value, the certified constant and what the
attack reached. Runs of unequal numbers of steps are refused. A certificate that is not at or above the
attack of the same validation, because it is below it or one of them is missing or no number, is an
error: exit code 1.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.output import exit_code, markdown, parser
from training.checkpoints import load_model
from training.errors import BadInput

_BASELINE, _PUBLISHED = "dot_product", "contractive_kim2021"
_BOUND, _ESTIMATE = "certificate/bound", "certificate/estimate"
_CUT = "nan"
"""What a monitor logs that had no time (training/monitors.py)."""


@dataclass(frozen=True)
class Run:
    """What one run left behind.

    Attributes:
        variant: the directory that its number stands in.
        parameters: of the model.
        steps: of training.
        nats: of the last validation.
        bounds: certified constants, one for each validation; empty without a certificate.
        estimates: what the attack reached, one for each validation: beside the bounds, where there are
            bounds. What is missing in the log is NaN in both.
        speed: characters per second, the median over the log's lines.
        inversion: largest inversion error of any validation, None if the model has no inverse.
    """

    variant: str
    parameters: int
    steps: int
    nats: float
    bounds: tuple[float, ...]
    estimates: tuple[float, ...]
    speed: float
    inversion: float | None

    @property
    def broken(self) -> str:
        """The first validation whose certificate is not at or above its attack; empty without one."""
        pairs = zip(self.bounds, self.estimates, strict=True) if self.bounds else ()
        # Not `estimate > bound`, which is false where one of them is NaN.
        wrong = [f"certified {b:.6g}, attack {e:.6g}" for b, e in pairs if not e <= b]
        return wrong[0] if wrong else ""


def read_run(folder: Path) -> Run:
    """Reads metrics.csv and checkpoints/last.ckpt of a finished run."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    def number(row: dict[str, str], name: str) -> float:
        try:
            return float(row.get(name) or math.nan)
        except ValueError as error:
            raise BadInput(f"{folder / 'metrics.csv'} is damaged: {error}") from error

    def column(name: str) -> tuple[float, ...]:
        return tuple(number(row, name) for row in rows if row.get(name, "") not in ("", _CUT))

    # A bound and its estimate are of one validation, which is one row.
    judged = [row for row in rows if row.get(_BOUND) or row.get(_ESTIMATE)]
    # An attack may have been cut, but not the last one.
    judged = [row for row in judged[:-1] if row.get(_ESTIMATE) != _CUT] + judged[-1:]
    certified = any(row.get(_BOUND) for row in judged)
    nats, inversion = column("val/nats"), column("inversion/error")
    if not nats or not column("step"):
        raise BadInput(f"the run {str(folder)!r} has no validation: it has not ended")
    model = load_model(folder / "checkpoints" / "last.ckpt")
    return Run(
        variant=folder.parent.name,
        parameters=sum(p.numel() for p in model.parameters()),
        steps=int(column("step")[-1]) + 1,
        nats=nats[-1],
        bounds=tuple(number(row, _BOUND) for row in judged) if certified else (),
        estimates=tuple(number(row, _ESTIMATE) for row in judged),
        speed=statistics.median(column("train/characters_per_second") or (float("nan"),)),
        inversion=max(inversion) if inversion else None,
    )


def table(runs: Sequence[Run]) -> str:
    """The Markdown table, best variant first."""
    steps = sorted({run.steps for run in runs})
    if len(steps) != 1:
        raise BadInput(f"the runs must have equal numbers of steps to be compared, got {steps}")
    by_variant: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_variant[run.variant].append(run)
    mean = {name: statistics.mean(run.nats for run in found) for name, found in by_variant.items()}
    rows = []
    for name in sorted(by_variant, key=mean.__getitem__):
        found = by_variant[name]
        nats = [run.nats for run in found]
        bounds = [run.bounds[-1] for run in found if run.bounds]
        estimates = [run.estimates[-1] for run in found if run.estimates]
        inversions = [run.inversion for run in found if run.inversion is not None]
        rows.append(
            {
                "variant": name,
                "parameters": f"{found[0].parameters:,}",
                "seeds": len(found),
                "nats": f"{mean[name]:.3f} ({min(nats):.3f} to {max(nats):.3f})",
                "bits": f"{mean[name] / math.log(2):.3f}",
                "share of the gap": _share(mean, name),
                "certified constant": f"{max(bounds):.4g}" if bounds else "none",
                "attack reaches": f"{max(estimates):.3g}" if estimates else "",
                "inversion error": f"{max(inversions):.1e}" if inversions else "",
                "characters per second": f"{statistics.median(run.speed for run in found):,.0f}",
            }
        )
    head = f"{steps[0]} steps, mean (smallest to largest) over the seeds, validation text.\n\n"
    return head + markdown(rows)


def _share(mean: dict[str, float], name: str) -> str:
    """How much of the way from the published scaling to the baseline a variant goes, in percent."""
    if not {_BASELINE, _PUBLISHED} <= mean.keys() or mean[_PUBLISHED] == mean[_BASELINE]:
        return ""
    share = (mean[_PUBLISHED] - mean[name]) / (mean[_PUBLISHED] - mean[_BASELINE])
    return f"{100.0 * share:.0f}%"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 1 if a certificate was passed, 2 if the runs cannot be compared."""
    given = parser(__doc__)
    given.add_argument("directory", type=Path, help="holds VARIANT/0, VARIANT/1, ...")
    folder = given.parse_args(arguments).directory
    runs: list[Run] = []

    def work() -> None:
        runs.extend(read_run(path.parent) for path in sorted(folder.glob("*/*/metrics.csv")))
        if not runs:
            raise BadInput(f"there are no runs (VARIANT/NUMBER/metrics.csv) in {str(folder)!r}")
        print(table(runs))

    if code := exit_code(work):
        return code
    broken = [f"{run.variant} ({run.broken})" for run in runs if run.broken]
    checked = sum(len(run.bounds) for run in runs)
    if broken:
        print(f"\nno certificate at or above the attack: {', '.join(broken)}", file=sys.stderr)
        return 1
    print(f"\nAt each of {checked} validations with a certificate it was at or above the attack.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
