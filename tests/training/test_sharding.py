"""With weights shared out over two processes every bounded variant learns what it learns on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.sharded_steps import BOUNDED

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sharded")
    command = [sys.executable, "-m", "tests.training.sharded_steps", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "runs.pt", weights_only=True)


@pytest.mark.parametrize("variant", BOUNDED)
def test_its_bounds_are_those_of_the_whole_weights(runs: dict[str, Any], variant: str) -> None:
    """Adam enlarges rounding errors of small gradients; a wrong bound is noticed all the same."""
    sharded, alone, broken = (runs[kind][variant] for kind in ("sharded", "alone", "broken"))
    torch.testing.assert_close(sharded["losses"], alone["losses"], rtol=0, atol=1e-5)
    assert (broken["losses"] - alone["losses"]).abs().max() > 3e-4
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(sharded["weights"][name], weight, rtol=0, atol=1e-3)
