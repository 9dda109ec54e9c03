"""Peak memory of one forward and backward pass, in a process of its own.

    python -m recipes.bench.memory lean 8192 512 8 2

prints one line of JSON: the process's peak and what it held before the pass, in bytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from recipes.bench.peers import Shape, variant
from recipes.bench.timing import training_step

_ROOT = Path(__file__).resolve().parents[2]
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Memory:
    """Peak of the whole process, and its size just before the pass (torch itself, mostly), in bytes."""

    peak: int
    before: int


def _status(field: str) -> int:
    """A size from Linux's process table, in bytes.

    Not resource.getrusage: a child started by vfork inherits its parent's peak there.
    """
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"{_STATUS} has no line {field!r}")


def peak_memory(key: str, shape: Shape, *, threads: int) -> Memory | None:
    """Peak memory of the layer's pass over one sequence; None on a system without /proc."""
    if not _STATUS.exists():
        return None
    numbers = [shape.length, shape.dim, shape.heads, threads]
    command = [sys.executable, "-m", "recipes.bench.memory", key, *map(str, numbers)]
    result = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=600)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}")
    return Memory(**json.loads(result.stdout))


def main(key: str, length: int, dim: int, heads: int, threads: int) -> None:
    torch.set_flush_denormal(True)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layer = variant(key).build(Shape(dim, heads, length))
    x = torch.randn(1, length, dim)
    before = _status("VmRSS")
    training_step(layer, x)(lambda: 0.0)
    print(json.dumps({"peak": _status("VmHWM"), "before": before}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
