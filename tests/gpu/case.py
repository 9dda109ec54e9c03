"""What is run on a device: a module, its inputs, and what to do with both."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lipformer.saving.entries import ModelConfig

Spec = functools.partial[Any]
EVERYWHERE = ("pretend", "cuda")
DRAWN = ("pretend",)  # of what draws random numbers
new = functools.partial  # new(Class, ...) describes a module; its arguments may be described ones


def build(spec: Any) -> Any:
    """The module that a description describes."""
    if not isinstance(spec, functools.partial):
        return spec
    return spec.func(
        *map(build, spec.args), **{name: build(value) for name, value in spec.keywords.items()}
    )


def described(spec: Any) -> str:
    """The description in words."""
    if not isinstance(spec, functools.partial):
        if isinstance(spec, ModelConfig):
            return spec.variant
        return getattr(spec, "__name__", str(spec))
    given = [*map(described, spec.args), *(f"{n}={described(v)}" for n, v in spec.keywords.items())]
    return f"{spec.func.__name__}({', '.join(given)})"


def options(spec: Any) -> set[tuple[str, str]]:
    """The (class, argument) pairs that a description gives, at any depth."""
    if not isinstance(spec, functools.partial):
        return set()
    bound = inspect.signature(spec.func).bind_partial(*spec.args, **spec.keywords)
    found = {(spec.func.__name__, name) for name in bound.arguments} | {(spec.func.__name__, "")}
    return found.union(*map(options, (*spec.args, *spec.keywords.values())))


def tokens(batch: int = 2, n: int = 6, d: int = 8) -> Tensor:
    """Input (B, N, D)."""
    return torch.randn(batch, n, d)


def padding(batch: int = 2, n: int = 6) -> Tensor:
    """A mask (B, N): the last two tokens of the last sample are padding."""
    mask = torch.zeros(batch, n, dtype=torch.bool)
    mask[-1, -2:] = True
    return mask


def _forward(module: Any, *inputs: Any, **more: Any) -> Any:
    return module(*inputs, **more)


@dataclass(frozen=True)
class Case:
    """A described module, how to draw its inputs (on the CPU) and what to do.

    Attributes:
        spec: describes the module, or whatever else `call` gets first.
        inputs: draw the arguments after it; tensors go to the device.
        named: draw keyword arguments.
        call: what is run, (module, *inputs, **named) -> tensors, numbers or containers of them.
        trains: backward is run too, and neither may make the host wait.
        compared: the devices whose numbers must be the CPU's. The pretend GPU draws as the CPU does.
        says: stands for the name of `call`.
    """

    spec: Any
    inputs: tuple[Callable[[], Any], ...] = (tokens,)
    named: dict[str, Any] = field(default_factory=dict)
    call: Callable[..., Any] = _forward
    trains: bool = True
    compared: tuple[str, ...] = EVERYWHERE
    says: str = ""

    @property
    def name(self) -> str:
        """Says what is run."""
        call = self.says or ("" if self.call is _forward else self.call.__name__.strip("<>_"))
        named = " ".join(f"{n}={'...' if callable(v) else v}" for n, v in self.named.items())
        return " ".join(part for part in (described(self.spec), call, named) if part)


def by_name(cases: list[Case]) -> dict[str, Case]:
    """The cases by their names, which must differ."""
    found = {case.name: case for case in cases}
    assert len(found) == len(cases), sorted(case.name for case in cases)
    return found
