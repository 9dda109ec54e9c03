"""The public interface: names and signatures are those of tests/interface.txt.

    python -m tests.test_interface    # writes the file anew, from the root of the repository

A change of the file is a change of the interface: it needs a line in CHANGELOG.md, and what goes away
or changes its meaning is deprecated first (docs/release.md).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

SNAPSHOT = Path(__file__).with_name("interface.txt")
PREFIX = "lipformer"
# The root comes last: what it re-exports is written once, where it is from.
PACKAGES = (
    *("functional", "estimates", "certificate", "layers", "flows", "models", "analysis"),
    "",
)


def signature(function: Callable[..., Any], name: str) -> str:
    """The name and the parameters with their defaults; self, cls and types are left out."""
    found = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in found.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    shown = found.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    return re.sub(r" at 0x\w+", "", f"{name}{shown}")


def describe(path: str, value: Any, listed: set[type]) -> Iterator[str]:
    """The lines of one public name; methods that a class has from another of ``listed`` are left out."""
    if inspect.isclass(value):
        ours = [base for base in value.__mro__ if base.__module__.startswith(PREFIX)]
        own = {"__init__", "__new__"} & {name for base in ours for name in vars(base)}
        bases = ", ".join(base.__name__ for base in value.__bases__)
        yield f"{signature(value, path) if own else path + '()'}: class of {bases}"
        members: dict[str, Any] = {}
        for base in reversed(ours):
            if base is value or base not in listed:
                members |= {name: v for name, v in vars(base).items() if not name.startswith("_")}
        for name, member in sorted(members.items()):
            function = getattr(member, "__func__", member)  # of class and static methods
            if isinstance(member, property):
                yield f"    {name}"
            elif inspect.isfunction(function):
                yield f"    {signature(function, name)}"
    elif callable(value):
        yield signature(value, path)
    else:
        yield f"{path}: {type(value).__name__}"


def interface(packages: list[ModuleType]) -> list[str]:
    """The lines of all names in the packages' ``__all__``."""
    names = [(f"{p.__name__}.{name}", getattr(p, name)) for p in packages for name in sorted(p.__all__)]
    listed = {value for _, value in names if inspect.isclass(value)}
    lines: list[str] = []
    first: dict[int, str] = {}
    for path, value in names:
        if isinstance(value, ModuleType):
            lines.append(f"{path}: package")
        elif first.setdefault(id(value), path) != path:
            lines.append(f"{path} = {first[id(value)]}")
        else:
            lines += describe(path, value, listed)
    return lines


def current() -> list[str]:
    return interface([importlib.import_module(f"lipformer.{name}".rstrip(".")) for name in PACKAGES])


def test_the_interface_is_the_one_written_down() -> None:
    difference = list(
        difflib.unified_diff(
            SNAPSHOT.read_text().splitlines(), current(), "interface.txt", "lipformer", lineterm="", n=0
        )
    )
    assert not difference, (
        "the public interface changed: write a line in CHANGELOG.md, deprecate what goes away "
        "(docs/release.md), then run `python -m tests.test_interface`\n" + "\n".join(difference)
    )


def test_changes_are_seen() -> None:
    def package(source: str) -> ModuleType:
        module = ModuleType(f"{PREFIX}.made_up")
        exec(source, module.__dict__)
        return module

    source = (
        "__all__ = ['f', 'C']\ndef f(x, *, a=1): pass\n"
        "class C:\n  def m(self, y): pass\n  @property\n  def p(self): pass\n  def _q(self): pass\n"
    )
    before = interface([package(source)])
    assert len(before) == 4
    for old, new in (("a=1", "a=2"), ("m(self, y)", "m(self)"), ("def p", "def r"), ("f(x", "f(z")):
        assert interface([package(source.replace(old, new))]) != before
    assert interface([package(source.replace("_q", "_s"))]) == before


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(current()) + "\n")
