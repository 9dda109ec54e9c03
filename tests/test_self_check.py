"""``python -m lipformer``: what it prints, and that its checks can fail."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lipformer as lf

ROOT = Path(__file__).resolve().parents[1]
BREAK_AND_RUN = """
import runpy
from dataclasses import replace
import lipformer as lf
{broken}
runpy.run_module("lipformer", run_name="__main__")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error::UserWarning", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_it_prints_versions_and_passes() -> None:
    result = run("-m", "lipformer")
    assert result.returncode == 0, result.stdout + result.stderr
    for expected in (lf.__version__, platform.python_version(), torch.__version__, "math (float32"):
        assert expected in result.stdout
    assert result.stdout.count("passed on cpu") == 3
    assert "FAILED" not in result.stdout


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (
            "certify = lf.certify\n"
            "lf.certify = lambda *a, **k: replace(certify(*a, **k), bound=certify(*a, **k).bound / 10)",
            "certificate FAILED on cpu: an attack reaches",
        ),
        (
            "inverse = lf.InvertibleResidual.inverse\n"
            "lf.InvertibleResidual.inverse = lambda *a, **k: inverse(*a, **k) + 1e-4",
            "inverse     FAILED on cpu: error",
        ),
        (
            "from lipformer.layers.attention import multihead\n"
            "multihead.l2_attention = lambda y, **k: 0.0 * y",
            "attention   FAILED on cpu: off the definition",
        ),
        ("lf.certify = None", "certificate FAILED on cpu: TypeError"),
    ],
)
def test_a_check_that_fails_is_told(broken: str, told: str) -> None:
    result = run("-c", BREAK_AND_RUN.format(broken=broken))
    assert result.returncode == 1, result.stdout + result.stderr
    assert told in result.stdout
    assert result.stdout.count("passed on cpu") == 2, "the other checks are run all the same"
