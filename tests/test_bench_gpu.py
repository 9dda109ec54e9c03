"""recipes.bench.gpu: it runs to its end on any device, and says what it did not measure."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch.autograd import DeviceType

from recipes.bench import device, gpu, sdpa
from recipes.bench.device import Counts
from recipes.bench.gpu import FULL, LAYERS, SMOKE, Bench, main
from recipes.bench.peers import Shape, variant
from recipes.bench.timing import Samples
from recipes.bench.training import RECIPES, config_of

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, str]:
    """The rows of a smoke run by title, its Markdown and what it prints."""
    directory = tmp_path_factory.mktemp("bench") / "new"
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert main(["--device", "cpu", "--smoke", "--output", str(directory)]) == 0
    sections = json.loads((directory / "gpu.json").read_text(encoding="utf-8"))
    markdown = (directory / "gpu.md").read_text(encoding="utf-8")
    return {s["title"]: s["rows"] for s in sections}, markdown, shown.getvalue()


def test_every_part_has_its_rows(smoke: tuple[dict[str, Any], str, str]) -> None:
    rows, markdown, shown = smoke
    assert {"fact": "torch", "value": torch.__version__} in rows["Device"]
    assert {"fact": "smoke", "value": True} in rows["Device"]
    assert len(rows["Layers"]) == 2 * len(SMOKE.lengths) * len(LAYERS)
    models = {path.stem for path in RECIPES.glob("*.yaml")}
    assert len(rows["Training steps"]) == 2 * len(models)
    assert {row["model"] for row in rows["Training steps"]} == models
    for title, section in rows.items():
        assert len({tuple(row) for row in section}) == 1, "the rows of a table have the same columns"
        assert f"## {title}\n" in markdown
        assert title in shown
    for row in rows["Layers"]:
        assert row["ms"] > 0.0
        assert row["layer"] != variant("sdpa").label or row["time, × sdpa"] == 1.0
    for row in rows["Training steps"]:
        assert row["model"] != "dot_product" or row["time, × dot_product"] == 1.0


def test_what_a_cpu_does_not_count_is_said(smoke: tuple[dict[str, Any], str, str]) -> None:
    rows, markdown, _ = smoke
    for name in ("peak MB", "host reads", "kernels", "kernels, × dot_product"):
        assert {row[name] for row in rows["Training steps"]} == {None}
    assert "| not measured |" in markdown


def test_kernels_are_those_of_the_widths_that_layers_ask_for(
    smoke: tuple[dict[str, Any], str, str],
) -> None:
    rows = smoke[0]["Kernels of scaled_dot_product_attention"]
    widths = {(row["layer"], row["dtype"], row["d"]): row["width in the kernel"] for row in rows}
    for d in (32, 64, 128):
        for dtype in ("bfloat16", "float32"):
            assert widths[variant("sdpa").label, dtype, d] == d
            for key in ("lean", "lean_alibi"):
                assert widths[variant(key).label, dtype, d] == d + 8
    assert {row["chosen"] for row in rows} == {"flash_for_cpu, forward, backward"}
    assert {(row["flash"], row["math"]) for row in rows} == {("forward, backward",) * 2}
    assert {(row["efficient"], row["cudnn"]) for row in rows} == {("no", "no")}
    assert "efficient: No viable backend" in smoke[1]


def test_figures_are_sound(smoke: tuple[dict[str, Any], str, str]) -> None:
    rows = smoke[0]
    limits = {"bfloat16": (1e-4, 0.02), "float32": (1e-9, 2e-6)}
    for row in rows["Errors against float64"]:
        low, high = limits[row["dtype"]]
        assert low < row["root mean square"] < high, row
    for row in rows["Certificate against attack"]:
        assert 0.0 < row["an attack reaches"] <= row["certificate"]
        assert row["holds"] == "yes"


def test_it_runs_to_its_end_on_the_pretend_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.bench", "--smoke", "--output", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    sections = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    rows = {section["title"]: section["rows"] for section in sections}
    assert rows["Device"][0] == {"fact": "device", "value": "pretend"}
    for row in rows["Layers"] + rows["Training steps"]:
        assert isinstance(row["host reads"], int), row
        assert row["peak MB"] is None
    # Two addmm, attention forward and backward, four mm, two sums, a cat and a copy.
    plain = [row for row in rows["Layers"] if row["layer"] == variant("sdpa").label]
    assert {(row["host reads"], row["kernels"]) for row in plain} == {(0, 12)}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "abacus"], "--device must be one of torch's, got 'abacus'"),
        (["--device", "cpu", "--output", __file__], "--output must be a directory"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_part_that_fails_is_reported_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(bench: Bench) -> gpu.Section:
        raise RuntimeError("[no] such | kernel")

    monkeypatch.setattr(gpu, "PARTS", (broken, gpu.device_section))
    assert main(["--device", "cpu", "--smoke", "--output", str(tmp_path)]) == 1
    failed, other = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert "RuntimeError: [no] such | kernel" in failed["rows"][0]["failed"]
    assert other["title"] == "Device"
    assert "[no] such | kernel" in capsys.readouterr().out
    assert "[no] such \\| kernel" in (tmp_path / "gpu.md").read_text(encoding="utf-8")


def test_steps_are_set_beside_the_baseline_and_failures_leave_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def steps(kernels: int) -> Callable[[], gpu.Step]:
        return lambda: lambda: launched.append(kernels)

    def fails(error: Exception) -> Callable[[], gpu.Step]:
        def make() -> gpu.Step:
            raise error

        return make

    def counter(work: Callable[[], object]) -> Counts:
        work()
        return Counts(0, launched[-1])

    launched: list[int] = []
    monkeypatch.setitem(device.COUNTERS, "cpu", counter)
    monkeypatch.setattr(gpu, "peak_memory", lambda device, work: 3 * 2**20)
    times = Samples({"other": [3.0], "base": [1.0]})
    monkeypatch.setattr(gpu, "interleave", lambda steps, **_: times)
    bench = Bench(CPU, SMOKE, seconds=0.0, compiled=False)
    build = {"other": steps(30), "base": steps(10), "full": fails(torch.OutOfMemoryError("all gone"))}
    rows = gpu.compare(bench, {**build, "broken": fails(RuntimeError("no such kernel\nat all"))}, "base")
    assert list(rows["other"].values()) == [3e3, 1 / 3, 3.0, "3.000 to 3.000 of 1", 3.0, 0, 30, 3.0]
    assert rows["base"]["time, × base"] == 1.0
    assert list(rows["full"].values()) == ["out of memory"] + ["-"] * 7
    assert list(rows["broken"].values()) == ["failed: no such kernel"] + ["-"] * 7
    # Too little memory is a fact, the other failure a defect.
    assert not gpu.Section("", "", [rows["full"], rows["base"]]).failed()
    assert gpu.Section("", "", [rows["base"], rows["broken"]]).failed()
    rows = gpu.compare(bench, {"other": steps(30), "base": fails(RuntimeError("gone"))}, "base")
    assert rows["other"]["kernels, × base"] is None


def test_the_full_sizes_are_those_of_the_recipes_for_gpus() -> None:
    for name in (path.stem for path in RECIPES.glob("*.yaml")):
        recipe = FULL.recipes / f"{name}.yaml"
        options = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        assert (options["data"]["block"], options["data"]["batch_size"]) == (FULL.block, FULL.batch)
        config = config_of(recipe, FULL.block, **FULL.model)
        assert (config.dim, config.num_heads, config.num_layers) == (FULL.dim, FULL.heads, 5)


def test_the_kernel_that_ran_is_seen_and_so_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    call = sdpa.call_of(variant("lean").build(Shape(16, 2, 8)), torch.randn(1, 8, 16))
    assert call[1]["scale"] == 1.0
    assert sdpa.attempt(call, "math").kernel == "math"
    assert sdpa.attempt(call, "flash").kernel == "flash_for_cpu"
    refused = sdpa.attempt(call, "cudnn")
    assert (refused.kernel, str(refused)) == (None, "no")
    assert refused.reason.startswith("No viable backend")
    # A device that does not know of backends runs what it has: that is not the one asked for.
    monkeypatch.setattr(sdpa, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    assert sdpa.attempt(call, "cudnn") == sdpa.Trial(None, False, "flash_for_cpu ran instead")


def test_a_kernel_without_a_backward_pass_is_not_said_to_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(out: torch.Tensor, gradient: torch.Tensor) -> None:
        raise RuntimeError("no derivative\nat all")

    call = sdpa.call_of(variant("lean").build(Shape(16, 2, 8)), torch.randn(1, 8, 16))
    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    trial = sdpa.attempt(call)
    assert (trial.kernel, str(trial), trial.reason) == ("flash_for_cpu", "forward only", "no derivative")


def test_memory_is_counted_from_what_was_held_before(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = SimpleNamespace(held=100, peak=900)
    module = SimpleNamespace(
        synchronize=lambda: None,
        reset_peak_memory_stats=lambda: setattr(stats, "peak", stats.held),
        memory_allocated=lambda: stats.held,
        max_memory_allocated=lambda: stats.peak,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert device.peak_memory(CPU, lambda: setattr(stats, "peak", 130)) == 30


def test_cuda_counts_warnings_and_what_ran_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    events = [
        SimpleNamespace(device_type=DeviceType.CUDA, is_user_annotation=False),
        SimpleNamespace(device_type=DeviceType.CUDA, is_user_annotation=True),
        SimpleNamespace(device_type=DeviceType.CPU, is_user_annotation=False),
    ]
    record = SimpleNamespace(events=lambda: events)
    monkeypatch.setattr(device, "profile", lambda activities: contextlib.nullcontext(record))

    def work() -> None:
        for message in (*["called a synchronizing CUDA operation"] * 2, "something else"):
            warnings.warn(message, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert device.cuda_counts(work) == Counts(host_reads=2, kernels=1)
        events.clear()
        assert device.cuda_counts(work) == Counts(host_reads=2, kernels=None)
    assert modes == ["warn", 0] * 2
