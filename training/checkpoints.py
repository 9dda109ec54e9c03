"""Checkpoints: written atomically, and read without running code in them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lipformer.models import LanguageModel, LanguageModelConfig
from lipformer.saving.saved_model import atomic_write, check_dtypes
from training.errors import BadInput

_PREFIX = "model."


def write_checkpoint(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes a file under a temporary name in the same directory and renames it when it is on disk."""
    with atomic_write(path) as part:
        try:
            with part.open("wb") as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            # On closing a file that could not be written torch may say so in place of why.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, str(path)) from error


def read_checkpoint(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """A checkpoint's tensors and plain values; nothing in it is executed.

    Raises:
        BadInput: there is no such file, it is truncated, or it is not one of ours.
    """
    if not Path(path).is_file():
        raise BadInput(f"there is no checkpoint {str(path)!r}")
    try:
        found = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # torch raises what it stumbles over
        raise BadInput(
            f"{str(path)!r} is truncated, not a checkpoint, or holds more than tensors and plain values"
        ) from error
    if not isinstance(found, dict) or not found.keys() >= {"lipformer", "state_dict"}:
        raise BadInput(f"{str(path)!r} is not the checkpoint of a lipformer language model")
    return found


def model_weights(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The model's tensors of a checkpoint, under the names they have in the model."""
    return {name.removeprefix(_PREFIX): value for name, value in checkpoint["state_dict"].items()}


class CheckpointFiles(TorchCheckpointIO):
    """Lightning's checkpoint reader and writer, through the two functions above."""

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
        return read_checkpoint(path, map_location or "cpu")


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
        weights = model_weights(found)
        check_dtypes(model.state_dict(), weights)
        model.load_state_dict(weights)
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise BadInput(f"{str(path)!r} does not hold the model it describes: {reason}") from error
    return model.eval()
