"""Speed of L2 attention beside dot-product attention and other people's L2 attention.

    python -m recipes.bench.attention [--out FILE.json] [--quick]

Times the forward and backward pass of whole causal layers in float32 and prints tables; the JSON file
has the same figures and whether the promised ones were reached. A missed target does not change the
exit code: the figures are what the script is for.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from recipes.bench import targets
from recipes.bench.memory import Memory, peak_memory
from recipes.bench.peers import VARIANTS, Shape
from recipes.bench.timing import Samples, interleave, training_step

_RESULTS = Path(__file__).parent / "results" / "attention.json"
_QUICK_DENSE_LENGTH = 1024
_MEMORY_KEYS = ("mha", "sdpa", "lean", "paper", "lean_alibi")


@dataclass(frozen=True)
class Run:
    """All that was measured. ``skipped`` says by length and key why a layer was not."""

    samples: dict[int, Samples]
    skipped: dict[tuple[int, str], str]
    memory: dict[str, Memory | None]
    verdicts: list[targets.Verdict]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.attention", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=_RESULTS, help="JSON file (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="under a minute, less exact")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(targets.LENGTHS), metavar="N")
    parser.add_argument("--tokens", type=int, default=targets.TOKENS, help="batch x N")
    parser.add_argument("--dim", type=int, default=targets.DIM)
    parser.add_argument("--heads", type=int, default=targets.HEADS)
    parser.add_argument("--memory-length", type=int, default=targets.MEMORY_LENGTH, metavar="N")
    parser.add_argument("--seconds", type=float, help="time for each length (default: 60, quick: 8)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="processor time instead of wall-clock time, for a busy machine; use with --threads 1",
    )
    options = parser.parse_args(argv)
    for n in options.lengths:
        if n < 1 or options.tokens % n:
            parser.error(f"each of --lengths must divide --tokens={options.tokens}, got {n}")
    if options.dim % options.heads:
        parser.error(f"--dim must be a multiple of --heads, got {options.dim} and {options.heads}")
    if options.seconds is None:
        options.seconds = 8.0 if options.quick else 60.0
    return options


def version(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lipformer": version("lipformer"),
        "x-transformers": version("x-transformers"),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": [round(v, 2) for v in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }


def measure(options: argparse.Namespace) -> Run:
    """Times every layer at every length, then takes the memory of some."""
    samples: dict[int, Samples] = {}
    skipped: dict[tuple[int, str], str] = {}
    for n in options.lengths:
        print(f"N = {n}: timing for about {options.seconds:.0f} s", file=sys.stderr)
        shape = Shape(options.dim, options.heads, n)
        x = torch.randn(options.tokens // n, n, options.dim)
        steps = {}
        for row in VARIANTS:
            if options.quick and row.dense and n > _QUICK_DENSE_LENGTH:
                skipped[n, row.key] = f"left out of a quick run above N = {_QUICK_DENSE_LENGTH}"
                continue
            try:
                steps[row.key] = training_step(row.build(shape), x)
            except ImportError as error:
                skipped[n, row.key] = f"not installed ({error}): pip install x-transformers"
        samples[n] = interleave(
            steps,
            seconds=options.seconds,
            min_repetitions=3 if options.quick else 5,
            clock=time.process_time if options.cpu_time else time.perf_counter,
        )
    print(f"N = {options.memory_length}: peak memory", file=sys.stderr)
    shape = Shape(options.dim, options.heads, options.memory_length)
    keys = ("lean",) if options.quick else _MEMORY_KEYS
    memory = {key: peak_memory(key, shape, threads=options.threads) for key in keys}
    # The targets speak of these sizes only; at others they stay unjudged.
    same = (options.tokens, options.dim, options.heads) == (targets.TOKENS, targets.DIM, targets.HEADS)
    verdicts = targets.judge(samples if same else {})
    same_memory = same and options.memory_length == targets.MEMORY_LENGTH
    verdicts.append(targets.judge_memory(memory["lean"] if same_memory else None))
    return Run(samples, skipped, memory, verdicts)


def as_json(run: Run, options: argparse.Namespace, environment: dict[str, Any]) -> dict[str, Any]:
    """The run as a JSON document; times in milliseconds, ratios as in timing.Ratio."""
    lengths: dict[str, Any] = {}
    for n, samples in run.samples.items():
        rows = []
        for row in VARIANTS:
            entry: dict[str, Any] = {"key": row.key, "label": row.label}
            if (n, row.key) in run.skipped:
                rows.append({**entry, "skipped": run.skipped[n, row.key]})
                continue
            entry["median_ms"] = samples.median(row.key) * 1e3
            entry["best_ms"] = samples.best(row.key) * 1e3
            for other in ("mha", "lean"):
                ratio = samples.ratio(row.key, other)
                entry[f"ratio_to_{other}"] = None if ratio is None else asdict(ratio)
            rows.append(entry)
        lengths[str(n)] = rows
    settings = {k: v for k, v in vars(options).items() if k != "out"}
    return {
        "environment": environment,
        "settings": {**settings, "dtype": "float32", "causal": True},
        "lengths": lengths,
        "quiet_share": {str(n): samples.quiet_share() for n, samples in run.samples.items()},
        "memory": {k: None if m is None else asdict(m) for k, m in run.memory.items()},
        "targets": [asdict(verdict) for verdict in run.verdicts],
    }


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    try:
        from recipes.bench.tables import show
    except ImportError as error:
        raise SystemExit(f"the tables need rich ({error}): pip install rich") from error
    # Before the threads start, which take the setting over: ALiBi's far keys give denormal numbers
    # that slow the kernels down.
    torch.set_flush_denormal(True)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    facts = environment()
    run = measure(options)
    document = as_json(run, options, facts)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=2) + "\n")
    show(document)
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
