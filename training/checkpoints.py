"""Checkpoints: written whole or not at all, read without running any code of theirs."""

from __future__ import annotations

import os
import pickle
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor
from torch.distributed.tensor import DTensor

from lipformer.models import LanguageModel, LanguageModelConfig
from training.errors import BadInput

_PREFIX = "model."


def write_checkpoint(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes a file under another name in the same directory; it takes its name when it is on disk."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp's files are private; these are like any other
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_checkpoint(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """A checkpoint's tensors and plain values; nothing in it is executed.

    Raises:
        BadInput: there is no such file, it is truncated, or it is not one of ours.
    """
    if not Path(path).is_file():
        raise BadInput(f"there is no checkpoint {str(path)!r}")
    try:
        found = torch.load(path, map_location=map_location, weights_only=True)
    except (
        RuntimeError,
        EOFError,
        OSError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        KeyError,
        ValueError,  # bytes that are no text, among others
        IndexError,
        AttributeError,
        TypeError,
    ) as error:
        reason = "it holds more than tensors and plain values, or is" if _is_whole(path) else "it is"
        raise BadInput(
            f"{str(path)!r} cannot be read: {reason} truncated or not a checkpoint"
        ) from error
    parts = [found.get(name) for name in ("lipformer", "state_dict")] if isinstance(found, dict) else []
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise BadInput(f"{str(path)!r} is not the checkpoint of a lipformer language model")
    return found


def _is_whole(path: str | os.PathLike[str]) -> bool:
    return zipfile.is_zipfile(path)


class CheckpointFiles(TorchCheckpointIO):
    """Lightning's way to and from the disk, through the two functions above."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint; addresses that are no local paths are left to Lightning."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            write_checkpoint(checkpoint, path)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Reads a checkpoint, always without unpickling code."""
        if "://" in str(path):
            return super().load_checkpoint(path, map_location, weights_only=True)
        found = read_checkpoint(path, map_location or "cpu")
        if "pytorch-lightning_version" not in found:
            raise BadInput(f"{str(path)!r} holds a model but no run that could be resumed")
        return found


def load_model(path: str | os.PathLike[str]) -> LanguageModel:
    """The model of a checkpoint, or of a directory of `save_pretrained`, in eval mode.

    Raises:
        BadInput: it cannot be read, or is of another model.
    """
    if Path(path).is_dir():
        try:
            return LanguageModel.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise BadInput(str(error)) from error
    found = read_checkpoint(path)
    try:
        model = LanguageModel(LanguageModelConfig.from_dict(found["lipformer"]["config"]))
        weights = {
            name.removeprefix(_PREFIX): value
            for name, value in found["state_dict"].items()
            if name.startswith(_PREFIX)
        }
        model.load_state_dict(weights)
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"{str(path)!r} does not hold the model it describes: {reason}") from error
    return model.eval()


def whole_model(model: LanguageModel) -> LanguageModel:
    """The model itself, or an unsharded copy where its weights are shared out over processes.

    All processes must call it: they send each other their parts.
    """
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        return model
    with torch.random.fork_rng():
        copy = LanguageModel(model.config)
    copy.load_state_dict({name: _whole(value) for name, value in model.state_dict().items()})
    copy.to(next(model.parameters()).device).train(model.training)
    return copy


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
