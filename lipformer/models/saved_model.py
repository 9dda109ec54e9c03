"""Models that are saved as safetensors and JSON, and loaded without unpickling.

Saved models: a safetensors file of weights and a JSON file that describes the model.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from lipformer.layers.one_pass import OnePass
from lipformer.models.config import LanguageModelConfig
from lipformer.models.vision_config import VisionTransformerConfig

# How the JSON file names the kind of model that a config is of, and what a person calls it.
FORMATS: dict[type, tuple[str, str]] = {
    LanguageModelConfig: ("lipformer.LanguageModel", "language model"),
    VisionTransformerConfig: ("lipformer.VisionTransformer", "vision transformer"),
}
Config = TypeVar("Config", LanguageModelConfig, VisionTransformerConfig)
CONFIG, WEIGHTS = "config.json", "model.safetensors"
# What weights may be stored in: torch's layers do not compute in others (float8, say).
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def save(directory: str | PathLike[str], config: Config, tensors: Mapping[str, Tensor]) -> None:
    """Writes both files, each to a temporary one that then takes its name.

    The weights name the config they were saved with by its digest, so that a save that was broken
    between the two files is noticed when it is loaded.
    """
    safetensors = _safetensors()
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"a model is saved in a directory, got the file {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    entries = {"format": FORMATS[type(config)][0], **config.to_dict()}
    text = json.dumps(entries, indent=2, ensure_ascii=False) + "\n"
    metadata = {"format": "pt", "config": _digest(config)}
    weights = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with atomic_write(folder / WEIGHTS) as part:
        safetensors.torch.save_file(weights, part, metadata)
    with atomic_write(folder / CONFIG) as part:
        part.write_text(text, encoding="utf-8")


def load(directory: str | PathLike[str], kind: type[Config]) -> tuple[Config, dict[str, Tensor]]:
    """Reads and checks both files of a model with a config of this kind."""
    safetensors = _safetensors()
    folder = Path(directory)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} has no file {name}; a saved model is a directory with {CONFIG} and {WEIGHTS}"
            )
    config = _read_config(folder / CONFIG, kind)
    try:
        with safetensors.safe_open(str(folder / WEIGHTS), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{folder / WEIGHTS} is truncated or no safetensors file: {error}") from error
    if metadata.get("config") != _digest(config):
        raise ValueError(
            f"{folder / WEIGHTS} was not saved with this {CONFIG}: save the model again, both files at "
            "once"
        )
    return config, tensors


def fill(model: nn.Module, tensors: Mapping[str, Tensor], directory: str | PathLike[str]) -> None:
    """Loads tensors into a model of the same names and shapes; each keeps its own dtype."""
    own = model.state_dict()
    wrong = sorted(own.keys() ^ tensors.keys())
    wrong += [name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape]
    if wrong:
        raise ValueError(
            f"{Path(directory) / WEIGHTS} does not fit the model: {len(wrong)} tensors are missing, "
            f"unknown or of another shape, the first is {wrong[0]}"
        )
    for name, tensor in tensors.items():
        allowed = DTYPES if own[name].is_floating_point() else (own[name].dtype,)
        if tensor.dtype not in allowed:
            raise ValueError(
                f"{Path(directory) / WEIGHTS}: {name} must have the dtype "
                f"{' or '.join(str(dtype) for dtype in allowed)}, got {tensor.dtype}"
            )
    # Copies, since safetensors may hand out views of the file, which someone may then write to.
    model.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, assign=True)


def _read_config(path: Path, kind: type[Config]) -> Config:
    name, called = FORMATS[kind]
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is truncated or no JSON file: {error}") from error
    if not isinstance(entries, dict) or entries.pop("format", None) != name:
        raise ValueError(f'{path} does not describe a lipformer {called} ("format": "{name}")')
    try:
        return kind.from_dict(entries)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _digest(config: LanguageModelConfig | VisionTransformerConfig) -> str:
    text = json.dumps(config.to_dict(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def atomic_write(path: str | PathLike[str]) -> Iterator[Path]:
    """A path in the same directory to write a file under; on disk and whole, it takes the file's name.

    If writing fails, the file stays what it was.
    """
    target = Path(path)
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


def _safetensors() -> ModuleType:
    """The package safetensors with its module for torch, or an error that says how to get it."""
    try:
        safetensors = importlib.import_module("safetensors")
        importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(
            "saving and loading models needs the package safetensors: pip install safetensors"
        ) from error
    return safetensors


_M = TypeVar("_M", bound="SavedModel")


class SavedModel(OnePass):
    """A model that is built from its config alone.

    Attributes:
        config_class: the class of its config.
        config: the config, with every default filled in.
    """

    config_class: ClassVar[type]
    config: Any
    _built: dict[str, str]

    def remember_parts(self) -> None:
        """Notes which parts the config stands for; called when the model is built."""
        self._built = self._parts()
        self.refresh()

    def _parts(self) -> dict[str, str]:
        """The class of each part by its path."""
        return {path: type(part).__name__ for path, part in self.named_modules()}

    def save_pretrained(self, directory: str | PathLike[str]) -> None:
        """Writes ``model.safetensors`` and ``config.json`` (needs the package safetensors).

        Raises:
            ValueError: parts of the model were replaced since it was built, by :func:`lipformer.bake` or
                by hand, so that its config no longer describes it.
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
        save(directory, self.config, self.state_dict())

    @classmethod
    def from_pretrained(
        cls: type[_M], directory: str | PathLike[str], device: torch.device | str = "cpu"
    ) -> _M:
        """The model of :meth:`save_pretrained`, in eval mode; nothing is unpickled.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, or not one of ours; it says which and how.
        """
        config, tensors = load(directory, cls.config_class)
        generator_state = torch.get_rng_state()
        model = cls(config)
        torch.set_rng_state(generator_state)
        fill(model, tensors, directory)
        return model.to(device).eval()
