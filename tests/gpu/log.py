"""What happens on the pretend GPU: reads by the host, kernels, floating-point operations."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
_MACHINERY = {"operators.py", "log.py"}


class Read(NamedTuple):
    """The host waited for the device: item, to_host, to_device, bool_index, index_to_device or wait."""

    kind: str
    operator: str
    where: str


@dataclass
class Log:
    """What happened on the device: reads by the host, kernels by name, operations by dtype."""

    reads: list[Read] = field(default_factory=list)
    kernels: Counter[str] = field(default_factory=Counter)
    flops: Counter[torch.dtype] = field(default_factory=Counter)


_logs: list[Log] = []


@contextlib.contextmanager
def record() -> Iterator[Log]:
    """Notes what happens on the device, in any thread."""
    log = Log()
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)


def _where() -> str:
    """The innermost three lines of the repository that led here, the innermost first."""
    lines: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(lines) < 3:
        path = Path(frame.f_code.co_filename)
        if (
            path.is_relative_to(ROOT)
            and "site-packages" not in path.parts
            and path.name not in _MACHINERY
        ):
            lines.append(f"{path.relative_to(ROOT)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines) or "(the autograd engine or torch)"


def recording() -> bool:
    """Whether anyone listens."""
    return bool(_logs)


def note_read(kind: str, func: Any) -> None:
    """Notes that the host waits for the device in an operator."""
    if _logs:
        read = Read(kind, str(func), _where())
        for log in _logs:
            log.reads.append(read)


def note_kernel(name: str, flops: int, dtype: torch.dtype | None) -> None:
    """Notes a kernel and its operations."""
    for log in _logs:
        log.kernels[name] += 1
        if dtype is not None:
            log.flops[dtype] += flops
