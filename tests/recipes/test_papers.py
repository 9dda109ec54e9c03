"""The experiments of the papers run small, keep what they measured, and go on where they were killed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.autograd.functional import jacobian

from lipformer.functional import lambert_w0
from recipes.papers import depth, inversion, tightness, treebank
from recipes.papers.__main__ import main
from recipes.papers.characters import trained
from recipes.papers.experiment import HELD, Finding, Panel, Part, Record, Row, Setting, rows_of
from recipes.papers.results import NAMES
from training.errors import BadInput


def rows_in(path: Path) -> list[Row]:
    return [row for part in json.loads(path.read_text())["parts"].values() for row in part["rows"]]


@pytest.fixture(autouse=True)
def _keep_denormals(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command sets for its process would stay for the other tests."""
    monkeypatch.setattr(torch, "set_flush_denormal", lambda mode: True)


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_runs_small_and_is_not_measured_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [name, "--smoke", "--threads", "1", "--out", str(tmp_path)]
    assert main(command) == 0
    out = tmp_path / "smoke"
    page = (out / f"{name}.md").read_text()
    assert "Does not hold" not in page
    assert f"({name}.png)" in page
    assert page in (out / "RESULTS.md").read_text()
    picture = (out / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 200_000
    rows = rows_in(out / f"{name}.json")
    assert rows
    lines = (out / f"{name}.csv").read_text().splitlines()
    assert len(lines) == 1 + len(rows)

    def refuse(self: Record) -> list[Part]:
        assert not self.missing
        return []

    monkeypatch.setattr(Record, "measure", refuse)
    (out / f"{name}.md").unlink()
    assert main(command) == 0
    assert (out / f"{name}.md").read_text() == page


def small(measured: list[str], killed: bool, holds: bool | None) -> ModuleType:
    """Three parts that note when they are measured; the second one may be killed."""

    def work(name: str, folder: Path) -> list[Row]:
        if killed and name == "b":
            raise KeyboardInterrupt
        measured.append(name)
        return [{"name": name, "value": 1.5}]

    module = ModuleType("recipes.papers.small", "Nowhere: Small.\n\nnothing.\n\nNothing.")
    module.parts = lambda setting: [Part(name, work, (name,)) for name in "abc"]  # type: ignore[attr-defined]
    module.PANELS = [Panel("name", "value")]  # type: ignore[attr-defined]
    module.judge = lambda rows: Finding(holds, "none", "Nothing.")  # type: ignore[attr-defined]
    return module


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    measured: list[str] = []
    setting = Setting("smoke")
    with pytest.raises(KeyboardInterrupt):
        list(Record(small(measured, True, None), setting, tmp_path).measure())
    assert measured == ["a"]
    again = Record(small(measured, False, None), setting, tmp_path)
    assert [part.name for part in again.missing] == ["b", "c"]
    assert [part.name for part in again.measure()] == ["b", "c"]
    assert measured == ["a", "b", "c"]
    assert [row["name"] for row in rows_of(again.measured)] == ["a", "b", "c"]
    assert rows_in(tmp_path / "small.json") == rows_of(again.measured)


def test_a_run_killed_after_its_training_goes_on(tmp_path: Path) -> None:
    steps = {"trainer.max_steps": 2}
    rows = [trained(Setting("smoke"), "ptb/small/l2", 0, steps, tmp_path, None) for _ in range(2)]
    nats, again = (row["nats"] for row in rows)
    assert nats == again


def test_ctrl_c_is_one_line_and_keeps_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("recipes.papers.__main__.experiment", lambda name: small([], True, None))
    assert main(["small", "--smoke", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert [row["name"] for row in rows_in(tmp_path / "smoke" / "small.json")] == ["a"]


def test_what_does_not_hold_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.papers.__main__.experiment", lambda name: small([], False, False))
    monkeypatch.setattr("recipes.papers.__main__.results", lambda folder: "")
    assert main(["small", "--smoke", "--out", str(tmp_path)]) == 1
    assert HELD[False] in (tmp_path / "smoke" / "small.md").read_text()


@pytest.mark.parametrize("text", ["{", "[]", '{"parts": 3}'])
def test_a_damaged_record_is_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "smoke").mkdir()
    (tmp_path / "smoke" / "divergence.json").write_text(text)
    assert main(["divergence", "--smoke", "--out", str(tmp_path)]) != 0
    assert "divergence.json is not a record" in capsys.readouterr().err


def attend(z: torch.Tensor) -> torch.Tensor:
    """L2 attention of tokens of one feature."""
    return (-(z[:, None] - z).square()).softmax(-1) @ z


@pytest.mark.parametrize(("norm", "order"), [("l2", 2), ("token", float("inf")), ("linf", float("inf"))])
def test_clusters_gain_what_their_tokens_gain(norm: str, order: float) -> None:
    n, side = 9, math.sqrt(1.5 + lambert_w0(8 * math.exp(-1.5)))
    z = torch.tensor([side, -side] * (n // 2) + [0.0]).double()
    exact = torch.linalg.matrix_norm(jacobian(attend, z), order).item()
    found = tightness.attack_clusters(n, norm, 1, steps=0, starts=1)
    assert found == pytest.approx(exact, rel=1e-9)


def test_an_attack_that_passes_a_certificate_is_told() -> None:
    published = {"l2": 3.0, "token": 0.0, "linf": 1.5, "linf, D = 4": 1.5}
    for ratio in (1.0, 0.999):
        rows = [
            {"tokens": 64, "norm": panel, "published / found": over, "certificate / found": ratio}
            for panel, over in published.items()
        ]
        assert tightness.judge(rows).holds is (ratio == 1.0)


@pytest.mark.parametrize(
    ("l2", "dot", "holds"), [(1e-9, 1.0, True), (1e-9, 1e-9, False), (1.0, 1.0, False)]
)
def test_inversion_needs_both_halves_of_its_claim(l2: float, dot: float, holds: bool) -> None:
    rows = [
        {"layer": name, "c": 0.9, "size": 1.0, "last": l2 if name == "L2" else dot}
        for name in inversion.LAYERS
    ]
    assert inversion.judge(rows).holds is holds


def test_a_record_of_another_level_or_of_other_data_is_refused(tmp_path: Path) -> None:
    list(Record(small([], False, None), Setting("smoke"), tmp_path).measure())
    for other in (Setting("quick"), Setting("smoke", tmp_path)):
        with pytest.raises(BadInput, match="measured with another"):
            Record(small([], False, None), other, tmp_path)


def test_depth_needs_dot_product_attention_to_fail() -> None:
    rows = [
        {"variant": v, "layers": n, "steps": 400, "nats": 1.8}
        for v in depth.VARIANTS
        for n in depth.DEEP
    ]
    assert depth.judge(rows).holds is False
    failed = [row | {"nats": 3.0} if row["layers"] > 8 else row for row in rows]
    ours = [row for row in rows if row["variant"] in depth.OURS]
    assert depth.judge([row for row in failed if row["variant"] not in depth.OURS] + ours).holds


@pytest.mark.parametrize(("base", "ours", "published"), [(2.9, 3.0, 2.0), (2.0, 2.0, 2.0), (2, 2.6, 3)])
def test_treebank_needs_less_lost_than_by_the_published_bound(
    base: float, ours: float, published: float
) -> None:
    nats = {treebank.BASELINE: base, treebank.OURS: ours, treebank.PUBLISHED: published}
    rows = [{"variant": v, "layers": 5, "steps": 800, "test_nats": x} for v, x in nats.items()]
    assert treebank.judge(rows).holds is False
