"""Models that are saved as weights (safetensors) and a config (JSON), and loaded without unpickling."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lipformer.functional.rounding import DTYPES
from lipformer.layers.layer import Layer
from lipformer.saving.entries import ModelConfig

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_M = TypeVar("_M", bound="SavedModel")


class SavedModel(Layer):
    """A model that is built from its config alone.

    Attributes:
        config_class: the class of its config.
        config: the config, with every default filled in.
    """

    config_class: ClassVar[type[ModelConfig]]
    config: Any
    _built: dict[str, str]

    def entries(self) -> dict[str, Any]:
        """What the model is built from, as JSON values."""
        entries: dict[str, Any] = self.config.to_dict()
        return entries

    @classmethod
    def from_entries(cls: type[_M], entries: Mapping[str, Any]) -> _M:
        """A model of :meth:`entries`, with weights drawn anew.

        Raises:
            ValueError, TypeError: an entry is unknown, missing or wrong.
        """
        return cls(cls.config_class.from_dict(entries))

    def remember_parts(self) -> None:
        """Notes which parts the config stands for; called when the model is built."""
        self._built = self._parts()
        self.refresh()

    def _parts(self) -> dict[str, str]:
        """The class and the settings of each part by its path; those of the root are the config."""
        return {
            path: f"{type(part).__name__}({part.extra_repr() if path else self.config})"
            for path, part in self.named_modules()
        }

    def save_pretrained(self, directory: str | PathLike[str]) -> None:
        """Writes ``model.safetensors`` and ``config.json`` (needs the package safetensors).

        Raises:
            ValueError: parts of the model were replaced or set anew since it was built, by
                :func:`lipformer.bake` or by hand, so that its config no longer describes it.
        """
        parts = self._parts()
        for path in sorted({*parts, *self._built}):
            now, built = parts.get(path, "nothing"), self._built.get(path, "nothing")
            if now != built:
                raise ValueError(
                    f"the config describes a model with {built} at {path or 'its root'}, got {now}: a "
                    "baked or changed model cannot be loaded from its config; save the model before "
                    "lipformer.bake, and bake what from_pretrained returns"
                )
        _save(directory, _format(type(self)), self.entries(), self.state_dict())

    @classmethod
    def from_pretrained(
        cls: type[_M], directory: str | PathLike[str], device: torch.device | str = "cpu"
    ) -> _M:
        """The model of :meth:`save_pretrained`, in eval mode; nothing is unpickled.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, or not one of ours; it says which and how.
            RuntimeError: the weights do not fit the config; it says which.
        """
        with torch.random.fork_rng(devices=[]):
            model, tensors = _load(directory, cls)
        check_dtypes(model.state_dict(), tensors)
        model.load_state_dict(tensors, assign=True)
        return model.to(device).eval()


def check_dtypes(own: Mapping[str, Tensor], given: Mapping[str, Any]) -> None:
    """ValueError unless given tensors are floats where a model's own are, and of its dtype elsewhere.

    Loading would cast or keep them: int8 without its scale, complex numbers without a half.
    """
    for name in own.keys() & given.keys():
        if isinstance(given[name], Tensor):
            allowed = DTYPES if own[name].is_floating_point() else (own[name].dtype,)
            if given[name].dtype not in allowed:
                known = ", ".join(map(str, allowed))
                raise ValueError(f"{name} must be of dtype {known}, got {given[name].dtype}")


def _save(
    directory: str | PathLike[str],
    form: str,
    entries: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> None:
    """Writes both files.

    The weights name the config they were saved with by its digest. It waits under that name while they
    are written, so that a process that is killed between the two files leaves a whole model, too.
    """
    import safetensors.torch

    text = json.dumps({"format": form, **entries}, indent=2, ensure_ascii=False) + "\n"
    metadata = {"format": "pt", "config": _digest(entries)}
    path, waiting = Path(directory) / WEIGHTS, Path(directory) / _waiting(_digest(entries))
    weights = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with atomic_write(waiting) as part:
        part.write_text(text, encoding="utf-8")
    try:
        with atomic_write(path) as part:
            safetensors.torch.save_file(weights, part, metadata)
    except Exception as error:
        waiting.unlink(missing_ok=True)
        if isinstance(error, safetensors.SafetensorError):
            raise OSError(f"{path} cannot be written: {error}") from error
        raise
    os.replace(waiting, path.with_name(CONFIG))


def _load(directory: str | PathLike[str], cls: type[_M]) -> tuple[_M, dict[str, Tensor]]:
    """A model of the class with fresh weights, and the weights it was saved with."""
    import safetensors

    path = Path(directory) / WEIGHTS
    model, digest = _built(path.with_name(CONFIG), cls)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies: safetensors may hand out views of the file, which someone may then write to.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is truncated or no safetensors file: {error}") from error
    wanted = metadata.get("config", "")
    waiting = path.with_name(_waiting(wanted))
    if wanted != digest and waiting.is_file():
        model, digest = _built(waiting, cls)
    if wanted != digest:
        raise ValueError(f"{path} was not saved with this {CONFIG}: save the model again, both at once")
    return model, tensors


def _format(cls: type[SavedModel]) -> str:
    """How the JSON file names the kind of model that a config is of."""
    return f"lipformer.{cls.__name__}"


def _built(path: Path, cls: type[_M]) -> tuple[_M, str]:
    """The model that a config file describes, and the file's digest."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if entries.pop("format", None) != _format(cls):
            raise ValueError(f'its "format" is not "{_format(cls)}"')
        return cls.from_entries(entries), _digest(entries)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or describes another model: {error}") from error


def _waiting(digest: str) -> str:
    """What a config is called until its weights are there."""
    return f".config.{digest}.json"


def _digest(entries: Mapping[str, Any]) -> str:
    text = json.dumps(entries, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def atomic_write(path: str | PathLike[str]) -> Iterator[Path]:
    """A path in the same directory to write a file under; on disk and whole, it takes the file's name.

    If writing fails, the file stays what it was. Directories are made.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}.", suffix=target.suffix)
    os.close(handle)
    try:
        yield Path(name)
        with open(name, "rb") as file:
            os.fsync(file.fileno())
        # mkstemp's files are private; these are made like any other.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
