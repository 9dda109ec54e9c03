"""Results of cases that a process of its own runs on a device."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

from tests.gpu.log import ROOT


def lines(*command: str) -> list[Any]:
    """The JSON lines that a module of tests/gpu prints; raises with its last words if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stderr[-3000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


@functools.cache
def results(group: str, device: str) -> dict[str, Any]:
    """What the worker says of each case of a group, by name."""
    return {line["case"]: line for line in lines("tests.gpu.worker", device, group)}
