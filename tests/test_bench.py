"""The benchmarks of layers, models and inverses: what they compare, how they sum up, and that they run.

No timing is asserted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.bench import attention, inverse, training
from recipes.bench.peers import VARIANTS, CdistAttention, OutputOnly, Shape, lean, variant
from recipes.bench.timing import Ratio, Samples, interleave, training_step

SHAPE = Shape(dim=32, heads=4, length=12)


@pytest.fixture(scope="module", autouse=True)
def _settings_stay() -> Iterator[None]:
    """A benchmark sets its process up."""
    threads = torch.get_num_threads()
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("key", [v.key for v in VARIANTS if v.key != "bounds"])
def test_every_layer_is_causal_and_keeps_the_shape(key: str) -> None:
    layer = variant(key).build(SHAPE).eval()
    x = torch.randn(2, SHAPE.length, SHAPE.dim)
    later = x.clone()
    later[:, -1] += 1.0
    with torch.no_grad():
        before, after = layer(x), layer(later)
    assert before.shape == x.shape
    change = (before - after).abs() / before.abs().max()  # the paper form starts with tiny outputs
    assert change[:, :-1].max() < 1e-5
    assert change[:, -1].max() > 1e-2


def test_the_cdist_layer_is_the_lean_layer_written_differently() -> None:
    slow = CdistAttention(SHAPE).double()
    fast = lean(SHAPE).double()
    fast.load_state_dict(slow.state_dict())
    x = torch.randn(2, SHAPE.length, SHAPE.dim, dtype=torch.float64)
    # 25 or fewer points: cdist then takes differences and is exact.
    torch.testing.assert_close(slow(x), OutputOnly(fast)(x), rtol=0, atol=1e-12)


def test_a_layers_step_takes_all_gradients_and_leaves_none() -> None:
    layer = lean(SHAPE)
    grads = training_step(OutputOnly(layer), torch.randn(1, SHAPE.length, SHAPE.dim))()
    assert [g.shape for g in grads[1:]] == [p.shape for p in layer.parameters()]  # type: ignore[index]
    assert grads[0].shape == (1, SHAPE.length, SHAPE.dim)  # type: ignore[index]
    assert all(p.grad is None for p in layer.parameters())


def test_a_models_step_learns() -> None:
    model = training.model_of(training.RECIPES / "invertible.yaml", block=8)
    before = [p.clone() for p in model.parameters()]
    training.training_step(model, batch=2, block=8)()
    assert all(p.grad is None for p in model.parameters())
    assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_steps_take_turns_and_ratios_pair_repetitions() -> None:
    ran: list[str] = []
    steps = {name: lambda name=name: ran.append(name) for name in "abc"}  # type: ignore[misc]
    samples = interleave(steps, seconds=0.0, min_repetitions=3)
    turns = [a for a, b in zip(ran, [*ran[1:], ""], strict=True) if a != b]
    assert [len(times) for times in samples.seconds.values()] == [3, 3, 3]
    assert len(turns) > 3, "not one after the other"
    busy = Samples({"a": [1.0, 9.0, 1.0, 2.0], "b": [2.0, 18.0, 2.0, 5.0]})
    assert busy.ratio("b", "a") == Ratio(2.0, 2.0, 2.125, 4), "load on one repetition is on both"
    assert busy.median("b") == 3.5
    assert busy.ratio("b", "absent") is None


GOOD = {"mha": 1.0, "lean": 0.8, "paper": 0.9, "cdist": 5.0, "lean_alibi": 0.85, "bounds": 0.05}


@pytest.mark.parametrize(
    ("key", "seconds", "name", "missed"),
    [
        ("lean", 0.8, "", set()),
        ("lean", 0.9, "lean form / nn.MultiheadAttention", {256, 1024}),
        ("paper", 1.1, "paper form / nn.MultiheadAttention", {256, 1024, 4096}),
        ("cdist", 3.0, "cdist / lean form", {1024, 4096}),
        ("lean_alibi", 0.9, "ALiBi / no ALiBi", {256, 1024, 4096}),
        ("bounds", 0.1, "spectral bounds / lean form", {1024}),
    ],
)
def test_a_missed_target_is_reported(key: str, seconds: float, name: str, missed: set[int]) -> None:
    samples = Samples({layer: [time] for layer, time in {**GOOD, key: seconds}.items()})
    verdicts = attention.judge(dict.fromkeys(attention.LENGTHS, samples), 999_000_000)
    assert {verdict["passed"] for verdict in verdicts} <= {True, False}
    found = {(v["name"], v["length"]) for v in verdicts if v["passed"] is False}
    assert found == {(name, n) for n in missed}


@pytest.mark.parametrize(("peak", "passed"), [(None, None), (999_000_000, True), (1_001_000_000, False)])
def test_memory_is_judged_and_what_is_absent_is_not(peak: int | None, passed: bool | None) -> None:
    *times, memory = attention.judge({}, peak)
    assert memory["passed"] is passed
    assert {verdict["passed"] for verdict in times} == {None}


@pytest.mark.parametrize(
    ("ratio", "clear"),
    [
        (Ratio(0.8, 0.7, 0.84, 5), True),
        (Ratio(0.8, 0.7, 0.9, 5), False),
        (Ratio(0.8, 0.7, 0.8, 2), False),
    ],
    ids=["clear", "a quartile contradicts", "too few"],
)
def test_what_chance_may_have_decided_is_unclear(ratio: Ratio, clear: bool) -> None:
    verdict = attention.TARGETS[0].judge(ratio)
    assert (verdict["passed"], verdict["clear"]) == (True, clear)


def test_the_attention_bench_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In small, and without x-transformers, to see the row that says so."""
    for name in ("x_transformers", "x_transformers.x_transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    sizes = ["--lengths", "8", "16", "--tokens", "32", "--dim", "16", "--heads", "2"]
    extent = ["--memory-length", "32", "--seconds", "0", "--quick", "--threads", "1"]
    out = tmp_path / "new" / "attention.json"
    attention.main(["--out", str(out), *sizes, *extent])
    document, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert document["environment"]["torch"] == torch.__version__
    assert document["settings"]["dim"] == 16
    assert list(document["lengths"]) == ["8", "16"]
    for rows in document["lengths"].values():
        assert [row["key"] for row in rows] == [v.key for v in VARIANTS]
        for row in rows:
            assert row["label"] in shown
            if row["key"].startswith("xt_"):
                assert row["skipped"].startswith("not installed")
                continue
            assert 0.0 < row["best_ms"] <= row["median_ms"]
            for ratio in (row["ratio_to_mha"], row["ratio_to_lean"]):
                assert 0.0 < ratio["low"] <= ratio["median"] <= ratio["high"]
                assert ratio["count"] == 3
            assert row["key"] != "mha" or row["ratio_to_mha"]["median"] == 1.0
    assert "x-transformers L2, flash=True: not installed" in shown
    # Sizes other than the promised ones are not judged.
    assert {target["passed"] for target in document["targets"]} == {None}
    (memory,) = document["memory"].values()
    assert memory is None or 50e6 < memory["before"] <= memory["peak"] < 1e9
    with pytest.raises(SystemExit):
        attention.arguments(["--lengths", "100"])
    assert "must divide --tokens=4096, got [100]" in capsys.readouterr().err


def test_the_training_bench_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "training.json"
    training.main(["--seconds", "0", "--batch", "1", "--block", "8", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert set(rows) == {path.stem for path in training.RECIPES.glob("*.yaml")}
    assert rows[training.BASELINE]["share"] == 1.0
    assert "l2_untied" in capsys.readouterr().out


def test_shares_are_of_the_baselines_speed() -> None:
    rows = training.report(Samples({training.BASELINE: [1.0, 3.0], "other": [2.0, 6.0]}), symbols=100)
    assert rows["other"]["share"] == 0.5
    assert rows["other"]["characters_per_second"] == 25.0


@pytest.fixture(scope="module")
def inverses(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("bench") / "inverse.json"
    sizes = ["--batch", "2", "--length", "6", "--dim", "8", "--heads", "2", "--scales", "1"]
    inverse.main(["--out", str(out), "--quick", "--threads", "1", *sizes])
    document = json.loads(out.read_text())
    assert all(document["environment"][package] for package in ("torch", "normflows", "FrEIA"))
    return document["rows"]


def test_every_solver_meets_every_branch(inverses: list[dict[str, Any]]) -> None:
    branches = {"attention, norm", "attention, causal", "feed-forward", "rotation"}
    pairs = {(row["solver"], row["branch"]) for row in inverses}
    assert len(pairs) == len(inverses) == 6 * len(branches)
    assert {branch for _, branch in pairs} == branches


def test_errors_and_evaluations_are_those_of_the_solvers(inverses: list[dict[str, Any]]) -> None:
    """Ours keeps its promise; FrEIA always takes its fifty steps, normflows stops early."""
    for row in inverses:
        if row["solver"].startswith("lipformer"):
            assert row["error"] <= row["promised"]
            assert row["evaluations"] >= 1
            assert row["error"] <= (1e-5 if "1e-06" in row["solver"] else 1e-3)
        else:
            assert row["error"] < 0.1
            assert row["branch"] != "rotation" or row["error"] > 5e-5
            assert "FrEIA" not in row["solver"] or row["evaluations"] == 51
