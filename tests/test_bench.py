"""The benchmark: what it compares, how it sums up, and that it runs. No timing is asserted."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.bench import targets
from recipes.bench.attention import arguments, main
from recipes.bench.load import Moment, quiet_between
from recipes.bench.memory import Memory
from recipes.bench.peers import VARIANTS, CdistAttention, OutputOnly, Shape, lean, variant
from recipes.bench.timing import Samples, interleave, training_step

SHAPE = Shape(dim=32, heads=4, length=12)


def build(key: str) -> torch.nn.Module:
    return variant(key).build(SHAPE)


@pytest.mark.parametrize("key", [v.key for v in VARIANTS if v.key != "bounds"])
def test_every_layer_is_causal_and_keeps_the_shape(key: str) -> None:
    layer = build(key).eval()
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


def test_a_step_runs_forward_and_backward_and_leaves_no_gradient() -> None:
    layer = lean(SHAPE)
    seen: list[bool] = []

    def clock() -> float:
        seen.append(all(p.grad is not None for p in layer.parameters()))
        return float(len(seen))

    taken = training_step(OutputOnly(layer), torch.randn(1, SHAPE.length, SHAPE.dim))(clock)
    assert seen == [False, True]
    assert taken == 1.0
    assert all(p.grad is None for p in layer.parameters())


def test_slow_layers_run_less_often_and_ratios_pair_repetitions() -> None:
    def takes(seconds: float) -> Callable[[Callable[[], float]], float]:
        return lambda clock: seconds

    steps = {"a": takes(1.0), "b": takes(2.0), "c": takes(1.0), "slow": takes(100.0)}
    samples = interleave(steps, seconds=0.0, min_repetitions=7)
    assert set(samples.seconds["a"]) == set(range(7))
    assert set(samples.seconds["slow"]) == {0, 2, 4, 6}
    ratio = samples.ratio("slow", "b")
    assert ratio is not None
    assert (ratio.median, ratio.count) == (50.0, 4)


def test_load_on_one_repetition_does_not_move_the_median_ratio() -> None:
    samples = Samples({"a": {0: 1.0, 1: 9.0, 2: 1.0}, "b": {0: 2.0, 1: 18.0, 2: 2.0, 3: 7.0}})
    ratio = samples.ratio("b", "a")
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high, ratio.count) == (2.0, 2.0, 2.0, 3)
    assert samples.ratio("b", "absent") is None


def test_disturbed_measurements_are_left_out_where_enough_remain() -> None:
    times = {"a": dict.fromkeys(range(5), 1.0), "b": {0: 2.0, 1: 50.0, 2: 2.0, 3: 60.0, 4: 2.0}}
    some = Samples(times, {"b": {1, 3}})
    ratio = some.ratio("b", "a")
    assert ratio is not None
    assert (ratio.high, ratio.count, ratio.quiet) == (2.0, 3, True)
    assert some.median("b") == 2.0
    assert some.quiet_share() == pytest.approx(0.8)
    # Two are too few: then all count, and the result says that the machine was busy.
    ratio = Samples(times, {"b": {1, 3}, "a": {4}}).ratio("b", "a")
    assert ratio is not None
    assert (ratio.count, ratio.quiet) == (5, False)


def test_others_are_noticed_above_a_tenth_of_the_processors() -> None:
    cores = os.cpu_count() or 1
    start = Moment(wall=0.0, busy=0.0, own=0.0)
    assert quiet_between(start, Moment(wall=1.0, busy=0.5 + 0.09 * cores, own=0.5))
    assert not quiet_between(start, Moment(wall=1.0, busy=0.52 + 0.11 * cores, own=0.5))
    assert quiet_between(Moment(0.0, None, 0.0), Moment(1.0, None, 0.0))


def run_with(**seconds: float) -> dict[int, Samples]:
    samples = Samples({key: {0: value} for key, value in seconds.items()})
    return dict.fromkeys(targets.LENGTHS, samples)


GOOD = {"mha": 1.0, "lean": 0.8, "paper": 0.9, "cdist": 4.0, "lean_alibi": 0.85, "bounds": 0.05}


def test_a_run_that_keeps_every_target_passes() -> None:
    verdicts = targets.judge(run_with(**GOOD))
    assert len(verdicts) == len(targets.TARGETS)
    assert all(verdict.passed is True for verdict in verdicts)


@pytest.mark.parametrize(
    ("key", "seconds", "name", "missed"),
    [
        ("lean", 0.9, "lean form / nn.MultiheadAttention", {256, 1024}),
        ("paper", 1.1, "paper form / nn.MultiheadAttention", {256, 1024, 4096}),
        ("cdist", 3.0, "cdist / lean form", {1024, 4096}),
        ("lean_alibi", 0.9, "ALiBi / no ALiBi", {256, 1024, 4096}),
        ("bounds", 0.1, "spectral bounds / lean form", {1024}),
    ],
)
def test_a_missed_target_is_reported(key: str, seconds: float, name: str, missed: set[int]) -> None:
    verdicts = targets.judge(run_with(**{**GOOD, "cdist": 5.0, key: seconds}))
    assert {(v.name, v.length) for v in verdicts if v.passed is False} == {(name, n) for n in missed}


@pytest.mark.parametrize(
    ("count", "spread", "disturbed", "clear"),
    [(5, 0.01, 0, True), (5, 0.3, 0, False), (5, 0.01, 3, False), (2, 0.01, 0, False)],
    ids=["clear", "a quartile contradicts", "disturbed", "too few"],
)
def test_what_load_or_chance_may_have_decided_is_unclear(
    count: int, spread: float, disturbed: int, clear: bool
) -> None:
    mha = dict.fromkeys(range(count), 1.0)
    lean_times = {i: 0.8 + spread * (i - count // 2) for i in range(count)}
    samples = Samples({"mha": mha, "lean": lean_times}, {"lean": set(range(disturbed))})
    verdict = targets.judge({256: samples})[0]
    assert (verdict.passed, verdict.clear) == (True, clear)


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    assert {verdict.passed for verdict in targets.judge({})} == {None}
    assert targets.judge_memory(None).passed is None
    assert targets.judge_memory(Memory(peak=999_000_000, before=0)).passed is True
    assert targets.judge_memory(Memory(peak=1_001_000_000, before=0)).passed is False


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """JSON and tables of a tiny run without x-transformers, to see the row that says so."""
    out = tmp_path_factory.mktemp("bench") / "new" / "attention.json"
    sizes = ["--lengths", "8", "16", "--tokens", "32", "--dim", "16", "--heads", "2"]
    extent = ["--memory-length", "32", "--seconds", "0", "--quick", "--threads", "1"]
    threads = torch.get_num_threads()
    text = io.StringIO()
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(text):
            for name in ("x_transformers", "x_transformers.x_transformers"):
                patch.setitem(sys.modules, name, None)
            main(["--out", str(out), *sizes, *extent])
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    return json.loads(out.read_text()), text.getvalue()


def test_the_json_file_holds_every_figure(report: tuple[dict[str, Any], str]) -> None:
    document, _ = report
    assert set(document) == {"environment", "settings", "lengths", "quiet_share", "memory", "targets"}
    assert document["environment"]["torch"] == torch.__version__
    assert document["environment"]["threads"] == 1
    assert document["environment"]["cpu_count"] == os.cpu_count()
    assert document["settings"]["dim"] == 16
    assert list(document["lengths"]) == list(document["quiet_share"]) == ["8", "16"]
    for rows in document["lengths"].values():
        assert [row["key"] for row in rows] == [v.key for v in VARIANTS]
        for row in rows:
            if row["key"].startswith("xt_"):
                assert row["skipped"].startswith("not installed")
                continue
            assert 0.0 < row["best_ms"] <= row["median_ms"]
            for other in ("mha", "lean"):
                ratio = row[f"ratio_to_{other}"]
                assert 0.0 < ratio["low"] <= ratio["median"] <= ratio["high"]
                assert ratio["count"] >= 1
            assert row["key"] != "mha" or row["ratio_to_mha"]["median"] == 1.0
    assert len(document["targets"]) == len(targets.TARGETS) + 1
    # Sizes other than the promised ones are not judged.
    assert {target["passed"] for target in document["targets"]} == {None}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_peak_memory_is_that_of_a_fresh_process(report: tuple[dict[str, Any], str]) -> None:
    document, _ = report
    assert set(document["memory"]) == {"lean"}
    for memory in document["memory"].values():
        assert 50e6 < memory["before"] <= memory["peak"] < 1e9


def test_the_tables_show_layers_and_what_is_missing(report: tuple[dict[str, Any], str]) -> None:
    _, text = report
    for row in VARIANTS:
        assert row.label in text
    assert "x-transformers L2, flash=True: not installed" in text
    assert "pip install x-transformers" in text
    assert "not measured" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lengths", "100"], "must divide --tokens=4096, got 100"),
        (["--heads", "7"], "--dim must be a multiple of --heads, got 512 and 7"),
    ],
)
def test_bad_sizes_are_named(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(argv)
    assert message in capsys.readouterr().err
