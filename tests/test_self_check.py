"""``python -m lipformer``: what it prints, and that its checks can fail."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lipformer as lf
from lipformer.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
CERTIFY, INVERSE = lf.certify, lf.InvertibleResidual.inverse


def test_it_prints_versions_and_passes() -> None:
    command = [sys.executable, "-W", "error::UserWarning", "-m", "lipformer"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    for expected in (lf.__version__, platform.python_version(), torch.__version__, "math (float32"):
        assert expected in result.stdout
    assert result.stdout.count("passed on cpu") == 3
    assert "FAILED" not in result.stdout


def smaller(*args: Any, **kwargs: Any) -> lf.certificate.Certificate:
    certificate = CERTIFY(*args, **kwargs)
    return replace(certificate, bound=certificate.bound / 10)


@pytest.mark.parametrize(
    ("name", "broken", "told"),
    [
        ("lipformer.certify", smaller, "certificate FAILED on cpu: an attack reaches"),
        ("lipformer.certify", None, "certificate FAILED on cpu: TypeError"),
        (
            "lipformer.InvertibleResidual.inverse",
            lambda *args: INVERSE(*args) + 1e-4,
            "inverse     FAILED on cpu: error",
        ),
        (
            "lipformer.layers.attention.multihead.l2_attention",
            lambda y, **kwargs: 0.0 * y,
            "attention   FAILED on cpu: off the definition",
        ),
    ],
)
def test_a_check_that_fails_is_told(
    name: str,
    broken: Any,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(name, broken)
    assert main() == 1
    printed = capsys.readouterr().out
    assert told in printed
    assert printed.count("passed on cpu") == 2, "the other checks are run all the same"
