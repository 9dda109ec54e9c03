"""The demonstration of `make train`, in small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipes import demo


def test_it_learns_prints_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"WIDTH": 16, "HEADS": 2, "DEPTH": 1, "LENGTH": 12, "BATCH": 4}.items():
        monkeypatch.setattr(demo, name, value)
    picture = tmp_path / "new" / "demo.png"
    demo.main(["--steps", "4", "--out", str(picture)])
    torch.set_flush_denormal(False)
    printed = capsys.readouterr().out
    assert "bits per character" in printed
    assert "Lipschitz bound" in printed
    assert picture.stat().st_size > 10_000


def test_the_certificate_stays_above_the_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WIDTH": 16, "HEADS": 2, "DEPTH": 1, "LENGTH": 12, "BATCH": 4}.items():
        monkeypatch.setattr(demo, name, value)
    history = demo.train(8, demo.Console(quiet=True))
    assert [step for step, *_ in history] == [0, 2, 4, 6, 8]
    assert all(gain <= bound for _, _, bound, gain in history)


def test_dot_product_attention_diverges_and_l2_does_not() -> None:
    gains = demo.gains_by_scale((1.0, 100.0))
    assert gains["dot-product"][1] > 100 * gains["dot-product"][0]
    assert max(gains["L2"]) <= gains["L2, certified"][0]


def test_a_bad_number_of_steps_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--steps", "0"])
    assert "--steps must be at least 1, got 0" in capsys.readouterr().err
