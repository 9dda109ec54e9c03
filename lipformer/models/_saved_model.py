"""Models that are saved as safetensors and JSON, and loaded without unpickling."""

from __future__ import annotations

from os import PathLike
from typing import Any, ClassVar, TypeVar

import torch

from lipformer.layers._bake import Bakeable
from lipformer.models import _pretrained as pretrained

_M = TypeVar("_M", bound="SavedModel")


class SavedModel(Bakeable):
    """A model that is built from its config alone.

    Attributes:
        config_class: the class of its config.
        config: the config, with every default filled in.
    """

    config_class: ClassVar[type]
    config: Any

    def save_pretrained(self, directory: str | PathLike[str]) -> None:
        """Writes ``model.safetensors`` and ``config.json`` (needs the package safetensors)."""
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
