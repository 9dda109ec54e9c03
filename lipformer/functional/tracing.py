"""Whether the values of tensors may be read: not while tracing, and elsewhere only where it is free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

_debug = False


@contextlib.contextmanager
def debug_checks(enabled: bool = True) -> Iterator[None]:
    """Context in which attention also checks its input for NaN and infinity.

    The check reads the whole input and synchronises the device, so it is off by default.

    Example:
        >>> import lipformer.functional as lff
        >>> with debug_checks():
        ...     lff.l2_attention(torch.full((1, 2, 4), float("nan")))
        Traceback (most recent call last):
        ...
        ValueError: y must be finite under debug_checks(), got 8 non-finite of 8 entries
    """
    global _debug
    before, _debug = _debug, enabled
    try:
        yield
    finally:
        _debug = before


def tracing() -> bool:
    """Whether values cannot be read: under torch.compile, torch.export or a torch.func transform."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def for_onnx() -> bool:
    """Whether what is traced is for torch.onnx.export; asked while :func:`tracing` alone."""
    return torch.onnx.is_in_onnx_export()


# Where its first attempt fails it traces once more, by dynamo, which would take torch's answer for no.
for_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_autocast(device_type: str) -> bool:
    """Whether torch.autocast knows a type of device."""
    return torch.amp.is_autocast_available(device_type)


# Dynamo of torch 2.9 and before cannot trace it.
has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def debugging() -> bool:
    """Whether values are to be read at any cost: under debug_checks(), not while tracing."""
    return _debug and not tracing()


def values_readable(t: Tensor) -> bool:
    """Reading a small CPU tensor is free; elsewhere it synchronises, so only under debug_checks()."""
    return not tracing() and (_debug or t.device.type == "cpu")
