"""Models that are saved as safetensors and JSON, and loaded without unpickling."""

from __future__ import annotations

from os import PathLike
from typing import Any, ClassVar, TypeVar

import torch

from lipformer.layers._one_pass import OnePass
from lipformer.models import _pretrained as pretrained

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
        pretrained.save(directory, self.config, self.state_dict())

    @classmethod
    def from_pretrained(
        cls: type[_M], directory: str | PathLike[str], device: torch.device | str = "cpu"
    ) -> _M:
        """The model of :meth:`save_pretrained`, in eval mode; nothing is unpickled.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, or not one of ours; it says which and how.
        """
        config, tensors = pretrained.load(directory, cls.config_class)
        generator_state = torch.get_rng_state()
        model = cls(config)
        torch.set_rng_state(generator_state)
        pretrained.fill(model, tensors, directory)
        return model.to(device).eval()
