"""Peak memory of a piece of code, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

NEEDS_PROC = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory is read from /proc"
)

# Not getrusage: its ru_maxrss begins with the peak of the process that started this one.
_PEAK = """
def _peak():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
"""


def memory_of(before: str, measured: str, *arguments: str) -> tuple[int, int]:
    """Peak memory in bytes before and after a piece of code, on one thread.

    In the tests' own process the peak of an earlier test would hide what this one needs.

    Args:
        before: code whose memory does not count, such as imports and a small first run.
        measured: code that goes on from it; it may print nothing.
        arguments: for ``sys.argv[1:]``.
    """
    script = "\n".join(
        [
            _PEAK,
            "import torch",
            "torch.set_num_threads(1)",
            before,
            "_before = _peak()",
            measured,
            "print(_before, _peak())",
        ]
    )
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    first, last = map(int, result.stdout.split())
    return first, last
