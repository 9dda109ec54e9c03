"""Checkpoints: written whole or not at all, read without running any code of theirs."""

from __future__ import annotations

import os
import pickle
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor

from lipformer.models import LanguageModel, LanguageModelConfig
from training.errors import BadInput, first_line

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
        BadInput: there is no such file, it is truncated or damaged, or it is not one of ours.
    """
    if not Path(path).is_file():
        raise BadInput(f"there is no checkpoint {str(path)!r}")
    _check_sums(path)
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


def _check_sums(path: str | os.PathLike[str]) -> None:
    """Refuses a file with flipped bits: torch reads tensors without looking at their checksums."""
    if not _is_whole(path):
        return
    try:
        with zipfile.ZipFile(path) as file:
            wrong = file.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as error:
        raise BadInput(f"{str(path)!r} is damaged: {first_line(error)}") from error
    if wrong is not None:
        raise BadInput(f"{str(path)!r} is damaged: its part {wrong!r} does not have its checksum")


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
        _check_is_run(found, path)
        return found


def _check_is_run(found: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    if "pytorch-lightning_version" not in found:
        raise BadInput(f"{str(path)!r} holds a model but no run that could be resumed")


def check_run(path: str | os.PathLike[str], command: str) -> None:
    """Looks at all that fit, validate or test will take from a checkpoint, before anything is written.

    Raises:
        BadInput: it cannot be read, or something in it is missing or of another shape.
    """
    found = read_checkpoint(path)
    _check_is_run(found, path)
    _model_of(found, path)
    loops = found.get("loops")
    missing = [] if isinstance(loops, dict) and f"{command}_loop" in loops else ["loops"]
    if command != "fit" and loops is None:
        missing = []  # to judge a model its weights are enough
    if command == "fit":
        missing += [
            name
            for name in ("optimizer_states", "lr_schedulers")
            if not _is_list_of_states(found.get(name))
        ]
    if missing:
        raise BadInput(
            f"{str(path)!r} has no usable {', '.join(missing)}: {command} cannot go on from it. Its "
            "weights are there: python -m training export, then --model.pretrained"
        )


def _is_list_of_states(part: Any) -> bool:
    return isinstance(part, list) and len(part) > 0 and all(isinstance(state, dict) for state in part)


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
    return _model_of(read_checkpoint(path), path).eval()


def _model_of(found: Mapping[str, Any], path: str | os.PathLike[str]) -> LanguageModel:
    """The model that a checkpoint describes, with its weights; draws no random numbers."""
    try:
        with torch.random.fork_rng(devices=[]):
            model = LanguageModel(LanguageModelConfig.from_dict(found["lipformer"]["config"]))
        expected = {f"{_PREFIX}{name}": value for name, value in model.state_dict().items()}
        wrong = _differences(found["state_dict"], expected)
        if not wrong:
            model.load_state_dict(
                {name: found["state_dict"][_PREFIX + name] for name in model.state_dict()}
            )
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        wrong = first_line(error)
    if wrong:
        raise BadInput(f"{str(path)!r} does not hold the model it describes: {wrong}")
    return model


def _differences(found: Mapping[str, Any], expected: Mapping[str, Tensor]) -> str:
    """What keeps weights from being loaded, in words; empty if nothing does."""
    missing = [name for name in expected if name not in found]
    unknown = [str(name) for name in found if name not in expected]
    shapes = [
        f"{name} ({tuple(getattr(found[name], 'shape', ()))}, not {tuple(value.shape)})"
        for name, value in expected.items()
        if name in found and getattr(found[name], "shape", None) != value.shape
    ]
    told = {
        "weights are missing": missing,
        "unknown weights": unknown,
        "weights of other shapes": shapes,
    }
    return "; ".join(f"{what}: {_some(names)}" for what, names in told.items() if names)


def _some(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
