"""Checkpoints are whole or not there, and run no code when they are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.tiny import checkpoint
from training.checkpoints import CheckpointFiles, load_model, read_checkpoint, write_checkpoint
from training.errors import BadInput


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    files, path = CheckpointFiles(), tmp_path / "new" / "a.ckpt"
    saved = checkpoint()
    files.save_checkpoint(saved, path)
    assert path.stat().st_mode & 0o044, "others may read it as they may read other files"
    model = load_model(path)
    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved["state_dict"][f"model.{name}"])
    model.save_pretrained(tmp_path / "saved")
    assert load_model(tmp_path / "saved").config == model.config


class Broken:
    """Something that cannot be written."""

    def __reduce__(self) -> Any:
        raise RuntimeError("the disk is full")


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_checkpoint(checkpoint(), path)
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="disk is full"):
        write_checkpoint({**checkpoint(), "more": Broken()}, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.ckpt"]


class Harm:
    """What an attacker would put into a pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    torch.save({**checkpoint(), "more": Harm(tmp_path / "harm")}, tmp_path / "bad.ckpt")
    with pytest.raises(BadInput, match="more than tensors and plain values"):
        read_checkpoint(tmp_path / "bad.ckpt")
    with pytest.raises(BadInput, match="more than tensors and plain values"):
        CheckpointFiles().load_checkpoint(tmp_path / "bad.ckpt", weights_only=False)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e5m2])
def test_weights_of_another_kind_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    bad, path = checkpoint(), tmp_path / "a.ckpt"
    name = "model.embedding.weight"
    bad["state_dict"][name] = bad["state_dict"][name].to(dtype)
    write_checkpoint(bad, path)
    told = rf"embedding.weight must be of dtype torch.float16, .* torch.float64, got {dtype}"
    with pytest.raises(BadInput, match=told):
        load_model(path)
    for kept in (torch.bfloat16, torch.float64):
        bad["state_dict"][name] = checkpoint()["state_dict"][name].to(kept)
        write_checkpoint(bad, path)
        load_model(path)


def test_other_files_are_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no checkpoint '.*nowhere.ckpt'"):
        load_model(tmp_path / "nowhere.ckpt")
    path = tmp_path / "a.ckpt"
    write_checkpoint(checkpoint(), path)
    for keep in (0, 10, 1000, path.stat().st_size - 10):
        (tmp_path / "cut.ckpt").write_bytes(path.read_bytes()[:keep])
        with pytest.raises(BadInput, match="is truncated, not a checkpoint") as info:
            load_model(tmp_path / "cut.ckpt")
        assert "\n" not in str(info.value)
    torch.save({"state_dict": {}}, path)
    with pytest.raises(BadInput, match="not the checkpoint of a lipformer language model"):
        load_model(path)
    other = checkpoint()
    other["lipformer"]["config"]["dim"] = 16
    write_checkpoint(other, path)
    with pytest.raises(BadInput, match="does not hold the model it describes") as info:
        load_model(path)
    assert "\n" not in str(info.value)
    with pytest.raises(BadInput, match="config.json"):
        load_model(tmp_path)
