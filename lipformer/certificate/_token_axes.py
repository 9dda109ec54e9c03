"""Which of (B, N, D) and (N, B, D) the parts of a module take."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def token_axes(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module, bool]]:
    """The parts that have an attribute ``batch_first``, with their paths and its value.

    Looked for inside torch's and lipformer's modules, which pass tokens on as they come; a module of
    anyone else may transpose them in between.
    """
    own = getattr(module, "batch_first", None)
    if isinstance(own, bool):
        yield path, module, own
    elif type(module).__module__.partition(".")[0] in ("torch", "lipformer"):
        for name, child in module.named_children():
            yield from token_axes(child, f"{path}.{name}" if path else name)


def mixed_axes(module: nn.Module) -> str | None:
    """What is wrong with a module that works along tokens in one part and along samples in another.

    Returns:
        A sentence that names two such parts, or None.
    """
    found = list(token_axes(module))
    first = next(((path, part) for path, part, batch_first in found if batch_first), None)
    other = next(((path, part) for path, part, batch_first in found if not batch_first), None)
    if first is None or other is None:
        return None
    return (
        f"{first[0]} ({type(first[1]).__name__}) takes tokens as (B, N, D), but {other[0]} "
        f"({type(other[1]).__name__}, batch_first=False) as (N, B, D): one of the two would mix samples"
    )
