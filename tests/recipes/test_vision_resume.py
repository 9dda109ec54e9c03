"""An interrupted run of recipes/vision is finished from its checkpoint, a planned one not prolonged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from recipes.vision.module import VisionModule
from tests.recipes.test_vision import LIGHTNING, run


@LIGHTNING
def test_a_checkpoint_finishes_an_interrupted_run_and_prolongs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = VisionModule.training_step

    def broken(module: VisionModule, batch: list[Tensor], batch_idx: int) -> Tensor:
        if module.global_step == 3:
            raise RuntimeError("the power is gone")
        return step(module, batch, batch_idx)

    four, last = "--trainer.max_steps=4", tmp_path / "last.ckpt"
    monkeypatch.setattr(VisionModule, "training_step", broken)
    with pytest.raises(RuntimeError, match="the power is gone"):
        run("fit", tmp_path, monkeypatch, four)
    monkeypatch.setattr(VisionModule, "training_step", step)
    assert torch.load(last, weights_only=True)["global_step"] == 2
    bar = "--trainer.enable_progress_bar=true"
    assert run("fit", tmp_path, monkeypatch, four, f"--ckpt_path={last}", bar) == 0
    assert "Epoch 0/-2" not in capsys.readouterr().out
    assert "4 updates" in (tmp_path / "report.md").read_text()
    assert torch.load(last, weights_only=True)["lr_schedulers"][0]["last_epoch"] == 4
    before = last.read_bytes()
    assert run("fit", tmp_path, monkeypatch, "--trainer.max_steps=6", f"--ckpt_path={last}") == 2
    error = capsys.readouterr().err
    assert "planned for 4 steps, after which its learning rate is zero, got 6 steps" in error
    assert "Traceback" not in error
    assert last.read_bytes() == before
