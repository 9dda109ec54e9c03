"""Converted models of Hugging Face, saved by themselves and loaded."""

from __future__ import annotations

from os import PathLike
from typing import Any

from torch import nn

from lipformer.layers.convert.conversion import RECORD, replace_attention


def load_converted(directory: str | PathLike[str]) -> nn.Module:
    """Loads a Hugging Face model that was converted by convert_attention and saved by save_pretrained.

    The config has the options of the conversion, so that the model is built, converted and filled with
    the saved weights. (``from_pretrained`` of its class would not know of the new layers.)

    Args:
        directory: what ``model.save_pretrained`` wrote.

    Returns:
        The model, in eval mode.

    Raises:
        ValueError: the directory holds no converted model, or other weights than its config says.
    """
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(directory)
    options = getattr(config, RECORD, None)
    if options is None:
        raise ValueError(
            f'{directory} holds no converted model: its config has no "{RECORD}"; '
            "convert the whole model in one call before save_pretrained"
        )
    name = (config.architectures or [""])[0]
    kind: Any = getattr(transformers, name, None)
    if kind is None:
        raise ValueError(f"{directory} is of the class {name!r}, which transformers does not have")

    def build(self: nn.Module, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        replace_attention(self, options, start=False)

    # Of the same name, by which transformers finds how the weights of a class are stored.
    converted: Any = type(name, (kind,), {"__init__": build, "__module__": kind.__module__})
    model, info = converted.from_pretrained(directory, output_loading_info=True)
    wrong = {key: names for key, names in info.items() if names and key.endswith("_keys")}
    if wrong:
        told = "; ".join(
            f"{len(names)} {key.replace('_', ' ')} ({', '.join(sorted(map(str, names))[:2])}, ...)"
            for key, names in wrong.items()
        )
        raise ValueError(f"the weights in {directory} do not fit its config: {told}")
    model.__class__ = kind
    return model.eval()
