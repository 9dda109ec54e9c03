"""recipes.bench.training measures whole training steps of every small recipe against the baseline."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from recipes.bench.timing import Samples
from recipes.bench.training import BASELINE, RECIPES, main, model_of, report, training_step


def test_a_step_learns_and_is_timed() -> None:
    model = model_of(RECIPES / "invertible.yaml", block=8)
    before = [p.clone() for p in model.parameters()]
    step = training_step(model, batch=2, block=8)
    clock = itertools.count().__next__
    assert step(clock) == 1
    assert all(p.grad is None for p in model.parameters())
    assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_shares_are_of_the_baselines_speed() -> None:
    seconds = {BASELINE: {0: 1.0, 1: 3.0, 2: 1.0}, "other": {0: 2.0, 1: 6.0, 2: 2.0}}
    rows = report(Samples(seconds), symbols=100)
    assert rows["other"]["share"] == pytest.approx(0.5)
    assert rows[BASELINE]["share"] == 1.0
    assert rows["other"]["characters_per_second"] == 50.0


def test_main(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_flush_denormal", lambda mode: True)
    out = tmp_path / "deep" / "training.json"
    main(["--seconds", "0", "--batch", "1", "--block", "8", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert set(rows) == {path.stem for path in RECIPES.glob("*.yaml")}
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("l2_untied", "invertible", "undisturbed", str(out)))
