"""Kills, a full disk, two runs at once: no checkpoint is lost or half-written, runs go on exactly."""

from __future__ import annotations

import csv
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lipformer.models import VARIANTS, LanguageModel
from tests.training.kills import equal
from tests.training.tiny import checkpoint, write_corpus
from training.checkpoints import read_checkpoint, write_checkpoint
from training.cli import claim_directory

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def kill(folder: Path, kind: str, kills: int) -> dict[str, int]:
    """What tests/training/kills.py reports."""
    command = [sys.executable, "-m", "tests.training.kills", str(folder), kind, str(kills), "0"]
    found = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    assert found.stdout, found.stderr
    return json.loads(found.stdout)


def test_a_few_kills_lose_no_saved_model(tmp_path: Path) -> None:
    assert kill(tmp_path, "pretrained", 5)["lost"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpoint", "pretrained"])
def test_two_hundred_kills_lose_nothing(tmp_path: Path, kind: str) -> None:
    report = kill(tmp_path, kind, 200)
    print(kind, report)
    assert report["lost"] == 0
    assert report["inside"] >= 50, "kills that came while a file was being written"


@pytest.mark.slow
def test_kills_would_show_what_is_written_in_place(tmp_path: Path) -> None:
    assert kill(tmp_path, "plain", 30)["lost"] > 0


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """Writing fails beyond a size, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 100, 5_000, 20_000])
def test_a_full_disk_leaves_the_old_files(tmp_path: Path, size: int) -> None:
    old, path = checkpoint(), tmp_path / "a.ckpt"
    write_checkpoint(old, path)
    model = VARIANTS["l2"](5, dim=32, num_heads=2, num_layers=1)
    model.save_pretrained(tmp_path / "model")
    more = {**checkpoint(), "more": torch.zeros(100_000)}
    with small_files(size), pytest.raises(OSError, match="File too large.*a.ckpt"):
        write_checkpoint(more, path)
    with small_files(size), pytest.raises(OSError, match="File too large"):
        VARIANTS["l2"](7, dim=32, num_heads=2, num_layers=1).save_pretrained(tmp_path / "model")
    assert equal(read_checkpoint(path), old)
    assert LanguageModel.from_pretrained(tmp_path / "model").config == model.config
    assert sorted(file.name for file in tmp_path.rglob("*") if file.is_file()) == [
        "a.ckpt",
        "config.json",
        "model.safetensors",
    ]


def test_runs_at_once_have_directories_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: claim_directory(tmp_path / "runs"), range(40)))
    assert sorted(int(folder.name) for folder in claimed) == list(range(40))


def test_writers_of_one_file_leave_one_of_theirs_whole(tmp_path: Path) -> None:
    path, saved = tmp_path / "a.ckpt", [checkpoint(), checkpoint()]
    write_checkpoint(saved[0], path)

    def write(number: int) -> None:
        write_checkpoint(saved[number % 2], path)

    with ThreadPoolExecutor(4) as pool:
        writes = [pool.submit(write, number) for number in range(40)]
        while not all(each.done() for each in writes):
            found = read_checkpoint(path)
            assert any(equal(found, each) for each in saved)
    for each in writes:
        each.result()
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(tmp_path: Path) -> None:
    """SIGKILL to the real command, which saves each step; then two whole runs at once beside it."""
    corpus, steps, kills = write_corpus(tmp_path / "corpus", lines=400), 120, 3
    command = [
        *(sys.executable, "-m", "training", "fit", "--config", "recipes/quickstart.yaml"),
        *("--data.source", "dir", "--data.path", str(corpus), "--data.block", "16"),
        *("--data.batch_size", "4", "--model.config.dim", "16", "--model.config.num_layers", "1"),
        *("--model.config.dropout", "0.1", "--trainer.max_steps", str(steps)),
        *("--trainer.log_every_n_steps", "1", "--trainer.val_check_interval", "50"),
        *("--checkpoint_every", "1", "--report.enabled", "false"),
        *("--trainer.enable_progress_bar", "false", "--certificate.enabled", "false"),
        *("--text.enabled", "false", "--trainer.accelerator", "cpu"),
        *("--trainer.default_root_dir", str(tmp_path / "runs")),
    ]

    def start(more: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, *more], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL)

    def folder(number: int) -> Path:
        return tmp_path / "runs" / str(number)

    chance, last, step = random.Random(0), Path(), 0
    resume: list[str] = []
    for number in range(kills):
        process = start(resume)
        last = folder(number) / "checkpoints" / "last.ckpt"
        deadline = time.monotonic() + 300
        while not last.is_file():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.3))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        step, before = read_checkpoint(last)["global_step"], step
        assert before < step < steps
        resume = ["--ckpt_path", str(last)]
    assert start(resume).wait(300) == 0
    both = [start([]), start([])]
    assert [process.wait(300) for process in both] == [0, 0]
    resumed, *whole = (
        read_checkpoint(folder(number) / "checkpoints" / "last.ckpt")
        for number in range(kills, kills + 3)
    )
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        for each in whole:
            assert equal(resumed[name], each[name]), name
    losses = losses_of(folder(kills + 1) / "metrics.csv")
    assert len(losses) == steps
    assert losses_of(folder(kills) / "metrics.csv") == losses[step:]


def losses_of(path: Path) -> list[tuple[str, str]]:
    with path.open() as file:
        return [(row["step"], row["train/nats"]) for row in csv.DictReader(file) if row["train/nats"]]
