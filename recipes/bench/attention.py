"""Speed of L2 attention beside dot-product attention and other people's L2 attention.

    python -m recipes.bench.attention [--out FILE.json] [--quick]

Times the forward and backward pass of whole causal layers in float32 and prints tables; the JSON file
has the same figures and whether the promised ones were reached. A missed target does not change the
exit code: the figures are what the script is for.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import benchmark

from recipes.bench.peers import VARIANTS, Shape, variant
from recipes.bench.timing import Ratio, Samples, environment, interleave, training_step
from recipes.output import parser, show, write_json

_QUICK_DENSE_LENGTH = 1024
_MEMORY_KEYS = ("mha", "sdpa", "lean", "paper", "lean_alibi")
_STATUS = Path("/proc/self/status")
# The sizes that targets speak of: batch x N tokens, D, H.
TOKENS, DIM, HEADS = 4096, 512, 8
LENGTHS = (256, 1024, 4096)
MEMORY_LENGTH = 8192


@dataclass(frozen=True)
class Target:
    """A limit of the time of one layer in times of another, at one length."""

    name: str
    over: str
    under: str
    length: int
    limit: float
    at_most: bool = True

    def kept(self, measured: float) -> bool:
        return measured <= self.limit if self.at_most else measured >= self.limit

    def judge(self, ratio: Ratio | None, enough: int = 3) -> dict[str, Any]:
        """The target with what was measured.

        ``passed`` goes by the median. ``clear`` tells whether both quartiles of enough measurements
        agree. Both are None where nothing was measured.
        """
        passed = clear = None
        if ratio is not None:
            passed = self.kept(ratio.median)
            clear = self.kept(ratio.low) == self.kept(ratio.high) and ratio.count >= enough
        measured = None if ratio is None else asdict(ratio)
        return {**asdict(self), "measured": measured, "passed": passed, "clear": clear}


TARGETS = (
    Target("lean form / nn.MultiheadAttention", "lean", "mha", 256, 0.85),
    Target("lean form / nn.MultiheadAttention", "lean", "mha", 1024, 0.85),
    Target("lean form / nn.MultiheadAttention", "lean", "mha", 4096, 1.0),
    *(Target("paper form / nn.MultiheadAttention", "paper", "mha", n, 1.0) for n in LENGTHS),
    *(Target("cdist / lean form", "cdist", "lean", n, 4.0, at_most=False) for n in (1024, 4096)),
    *(Target("ALiBi / no ALiBi", "lean_alibi", "lean", n, 1.1) for n in LENGTHS),
    Target("spectral bounds / lean form", "bounds", "lean", 1024, 0.10),
)
MEMORY = Target("lean form, peak memory (GB)", "lean", "", MEMORY_LENGTH, 1.0)


def judge(samples: dict[int, Samples], peak: int | None) -> list[dict[str, Any]]:
    """A run, by length, and the peak memory of the lean layer in bytes, against every target."""
    empty = Samples({})
    found = [t.judge(samples.get(t.length, empty).ratio(t.over, t.under)) for t in TARGETS]
    size = (peak or 0) / 1e9
    return [*found, MEMORY.judge(Ratio(size, size, size, 1) if peak else None, enough=1)]


def _status(field: str) -> int:
    """A size from Linux's process table, in bytes."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def _pass_memory(key: str, shape: Shape, threads: int) -> dict[str, int]:
    prepare(threads)
    step = training_step(variant(key).build(shape), torch.randn(1, shape.length, shape.dim))
    before = _status("VmRSS")
    step()
    return {"peak": _status("VmHWM"), "before": before}


def peak_memory(key: str, shape: Shape, threads: int) -> dict[str, int] | None:
    """Bytes of a new process that runs one pass over one sequence: its peak, and before the pass.

    Before it holds torch itself, mostly. None on a system without /proc.
    """
    if not _STATUS.exists():
        return None
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_pass_memory, key, shape, threads).result()


def prepare(threads: int) -> None:
    """The process as layers are measured in."""
    # Before the threads start, which take the setting over: ALiBi's far keys give denormal numbers
    # that slow the kernels down.
    torch.set_flush_denormal(True)
    torch.set_num_threads(threads)
    torch.manual_seed(0)


def measure(options: argparse.Namespace, n: int) -> tuple[Samples, dict[str, str]]:
    """Times every layer at one length; also says why layers were not."""
    print(f"N = {n}: timing for about {options.seconds:.0f} s", file=sys.stderr)
    shape = Shape(options.dim, options.heads, n)
    x = torch.randn(options.tokens // n, n, options.dim)
    steps, skipped = {}, {}
    for row in VARIANTS:
        if options.quick and row.dense and n > _QUICK_DENSE_LENGTH:
            skipped[row.key] = f"left out of a quick run above N = {_QUICK_DENSE_LENGTH}"
            continue
        try:
            steps[row.key] = training_step(row.build(shape), x)
        except ImportError as error:
            skipped[row.key] = f"not installed ({error}): pip install x-transformers"
    samples = interleave(
        steps,
        seconds=options.seconds,
        min_repetitions=3,
        timer=time.process_time if options.cpu_time else benchmark.timer,
    )
    return samples, skipped


def rows_of(samples: Samples, skipped: dict[str, str]) -> list[dict[str, Any]]:
    """A row for each layer at one length; times in milliseconds, ratios as in timing.Ratio."""
    rows = []
    for row in VARIANTS:
        entry: dict[str, Any] = {"key": row.key, "label": row.label}
        if row.key in skipped:
            entry["skipped"] = skipped[row.key]
        else:
            entry["median_ms"] = samples.median(row.key) * 1e3
            entry["best_ms"] = min(samples.seconds[row.key]) * 1e3
            for other in ("mha", "lean"):
                ratio = samples.ratio(row.key, other)
                entry[f"ratio_to_{other}"] = None if ratio is None else asdict(ratio)
        rows.append(entry)
    return rows


def show_tables(document: dict[str, Any]) -> None:
    """Prints the figures of the JSON file, and why layers are missing from them."""
    speeds: dict[str, dict[str, Any]] = {v.key: {"layer": v.label} for v in VARIANTS}
    for n, rows in document["lengths"].items():
        for row in rows:
            ratio = row.get("ratio_to_mha")
            speeds[row["key"]][f"N = {n}, ms"] = row.get("median_ms")
            speeds[row["key"]][f"{n}, × MHA"] = ratio and f"{ratio['median']:.3f}"
    s = document["settings"]
    show(
        list(speeds.values()),
        f"forward + backward, {s['tokens']} tokens, D = {s['dim']}, H = {s['heads']}, "
        f"{s['dtype']}, {s['threads']} threads, {'processor' if s['cpu_time'] else 'wall-clock'} time",
    )
    every = [row for rows in document["lengths"].values() for row in rows if "skipped" in row]
    for reason in sorted({f"{row['label']}: {row['skipped']}" for row in every}):
        print(reason)
    show(
        [
            {"layer": variant(key).label, **{f"{k}, MB": v / 1e6 for k, v in (found or {}).items()}}
            for key, found in document["memory"].items()
        ],
        f"a process's memory, its peak and before the pass, one sequence of {s['memory_length']} tokens",
    )
    words = {True: "met", False: "MISSED", None: "not measured"}
    show(
        [
            {
                "target": t["name"],
                "N": t["length"],
                "limit": f"{'≤' if t['at_most'] else '≥'} {t['limit']:.2f}",
                **(t["measured"] or dict.fromkeys(Ratio.__annotations__)),
                "": words[t["passed"]] + (", unclear" if t["clear"] is False else ""),
            }
            for t in document["targets"]
        ],
        "targets",
    )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    given = parser(__doc__)
    add = given.add_argument
    results = Path(__file__).parent / "results" / "attention.json"
    add("--out", type=Path, default=results, help="JSON file")
    add("--quick", action="store_true", help="under a minute, less exact")
    add(
        "--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="N", help="tokens of a sequence"
    )
    add("--tokens", type=int, default=TOKENS, help="batch x N")
    add("--dim", type=int, default=DIM, help="D")
    add("--heads", type=int, default=HEADS, help="H")
    add("--memory-length", type=int, default=MEMORY_LENGTH, metavar="N", help="of the memory's pass")
    add("--seconds", type=float, help="for each length (default: 60, quick: 8; %(default)s)")
    add("--threads", type=int, default=2, help="of torch")
    add(
        "--cpu-time",
        action="store_true",
        help="processor time instead of wall-clock time, for a busy machine; use with --threads 1",
    )
    options = given.parse_args(argv)
    if any(n < 1 or options.tokens % n for n in options.lengths):
        given.error(f"each of --lengths must divide --tokens={options.tokens}, got {options.lengths}")
    if options.seconds is None:
        options.seconds = 8.0 if options.quick else 60.0
    return options


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    prepare(options.threads)
    facts = environment("x-transformers")
    runs = {n: measure(options, n) for n in options.lengths}
    print(f"N = {options.memory_length}: peak memory", file=sys.stderr)
    shape = Shape(options.dim, options.heads, options.memory_length)
    keys = ("lean",) if options.quick else _MEMORY_KEYS
    memory = {key: peak_memory(key, shape, options.threads) for key in keys}
    # The targets speak of these sizes only; at others they stay unjudged.
    same = (options.tokens, options.dim, options.heads) == (TOKENS, DIM, HEADS)
    lean = (memory["lean"] or {}) if same and options.memory_length == MEMORY_LENGTH else {}
    samples = {n: found for n, (found, _) in runs.items()} if same else {}
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    document = {
        "environment": facts,
        "settings": {**settings, "dtype": "float32", "causal": True},
        "lengths": {str(n): rows_of(*run) for n, run in runs.items()},
        "memory": memory,
        "targets": judge(samples, lean.get("peak")),
    }
    show_tables(document)
    write_json(options.out, document)


if __name__ == "__main__":
    main()
