"""Two processes learn what one learns from the double batch, and certify the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.tiny import write_corpus
from training.checkpoints import load_model

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, strategy: str, variant: str, packing: str) -> list[dict[str, Any]]:
    corpus = write_corpus(folder / "corpus", lines=30)
    arguments = [str(corpus), str(folder), strategy, variant, packing]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PL_GLOBAL_SEED": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.two_processes", *arguments],
        cwd=ROOT,
        env=environment,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    count = 1 if strategy == "one" else 2
    return [torch.load(folder / f"{strategy}{rank}.pt", weights_only=True) for rank in range(count)]


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_its_file_trains_on_two_processes(tmp_path: Path, name: str) -> None:
    """With the file's own strategy, precision, clipping and callbacks, in small."""
    given = {
        "config": f"recipes/ptb/{name}.yaml",
        "trainer.accelerator": "cpu",
        "trainer.max_steps": 2,
        "trainer.max_epochs": "null",
        "trainer.val_check_interval": 2,
        "trainer.check_val_every_n_epoch": "null",
        "trainer.default_root_dir": tmp_path,
        "data.source": "dir",
        "data.path": write_corpus(tmp_path / "corpus", lines=24),
        "data.characters": "plain",
        "data.block": 16,
        "data.batch_size": 4,
        "model.config.dim": 16,
        "model.config.num_heads": 4,
        "model.config.num_layers": 1,
        "model.compile": "false",
        "certificate.steps": 1,
        "certificate.restarts": 1,
        "text.max_new": 4,
    }
    options = [part for option, value in given.items() for part in (f"--{option}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "training", "fit", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "validation, bits per character" in done.stdout
    saved = torch.load(tmp_path / "0" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    load_model(tmp_path / "0" / "checkpoints" / "last.ckpt")


# The paper's packing has batches whose processes have unlike numbers of symbols.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "variant", "packing"),
    [
        ("ddp", "invertible", "stream"),
        ("ddp", "contractive", "sentences"),
        ("fsdp", "invertible", "sentences"),
        ("fsdp", "lipschitz", "stream"),
        # Not dot_product: its keys' bias has the gradient 0, whose rounding errors Adam enlarges.
        ("fsdp", "l2_untied", "stream"),
    ],
)
def test_two_processes_learn_what_one_learns(
    tmp_path: Path, strategy: str, variant: str, packing: str
) -> None:
    (one,) = run(tmp_path, "one", variant, packing)
    first, second = run(tmp_path, strategy, variant, packing)
    assert first["sharded"] == second["sharded"] == (strategy == "fsdp")
    assert first["bound"] == second["bound"]
    assert first["valid"] == second["valid"]
    for name, value in one["weights"].items():
        assert torch.equal(first["weights"][name], second["weights"][name]), name
        torch.testing.assert_close(first["weights"][name], value, rtol=1e-4, atol=1e-5)
    # Each process has its part of the sum over the whole batch's mean number of symbols.
    for whole, mine, theirs in zip(one["train"], first["train"], second["train"], strict=True):
        assert whole[:4] == mine[:4] == theirs[:4]
        assert (mine[4] + theirs[4]) / 2 == pytest.approx(whole[4], abs=1e-5)
    for (*step, whole_loss), (*same, loss) in zip(one["valid"], first["valid"], strict=True):
        assert step == same
        assert loss == pytest.approx(whole_loss, abs=1e-5)
    torch.testing.assert_close(first["logits"], first["plain"], rtol=1e-5, atol=1e-6)
    if variant == "l2_untied":
        assert first["bound"] is None
    else:
        assert first["bound"] == pytest.approx(one["bound"], rel=1e-4)
    saved = load_model(tmp_path / f"{strategy}.ckpt")
    for name, value in saved.state_dict().items():
        assert torch.equal(value, first["weights"][name])
