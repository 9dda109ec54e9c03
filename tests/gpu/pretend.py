"""A pretend GPU: the device "pretend", whose tensors hold CPU data and which behaves as a GPU would.

It is torch's PrivateUse1 backend written in Python. Its tensors are ordinary ones: modules, autograd,
torch.func and optimisers treat them as those of any device. Mixing devices raises; each read by the
host and each copy is noted with its kind, operator, file and line; kernels (what runs on the device and
is not a view or an allocation) are counted by name, and floating-point operations by dtype.

The name of the backend is global to a process and cannot be taken back, so :func:`device` is never
entered by pytest's own process: tests start processes that do (`worker.py`). What is patched, is patched
inside it alone::

    with device(), record() as log:
        loss = model.to("pretend")(x.to("pretend")).sum()
        loss.backward()
    log.reads, sum(log.kernels.values()), log.flops[torch.float64]

A command line that trains on it, with Lightning's accelerator "pretend" (see `accelerator.py`)::

    python -m tests.gpu.run training fit --config recipes/quickstart.yaml --trainer.accelerator pretend

What it cannot show: time, memory, rounding (kernels are the CPU's), kernels of NVIDIA's libraries, and
what CUDA does asynchronously or in threads (backward runs in the calling one).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from tests.gpu import autocast, operators
from tests.gpu.log import Log, Read, record
from tests.gpu.operators import DeviceMixing
from tests.gpu.tensors import NAME, Generator, StorageMethods, pin_memory

__all__ = ["NAME", "DeviceMixing", "Log", "Read", "device", "record"]


class _Module(_DummyBackendModule):
    """torch.pretend."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def synchronize(self, device: Any = None) -> None:
        pass

    def set_device(self, device: Any) -> None:
        pass

    def is_bf16_supported(self) -> bool:
        return True


@functools.cache
def _register() -> list[torch.library.Library]:
    """Names the backend and gives it its operators; returns what must be kept alive."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    return [operators.register(), *autocast.register(NAME)]


@contextlib.contextmanager
def device() -> Iterator[None]:
    """Makes the device usable: with generators of its own, pinned memory, saving and loading."""
    _register()
    swap = torch.__future__.get_swap_module_params_on_conversion()
    # `module.to` keeps the identity of parameters (and their ties), as it does on CUDA.
    torch.__future__.set_swap_module_params_on_conversion(True)
    patches = [
        (torch, "Generator", Generator),
        (Tensor, "pin_memory", pin_memory),
        (Tensor, "is_pinned", lambda t: getattr(t.untyped_storage(), "pinned", False)),
        (torch.accelerator, "synchronize", lambda device=None: None),
        *(
            (torch.UntypedStorage, name, getattr(StorageMethods, name))
            for name in ("cpu", "clone", "to", "data_ptr")
        ),
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swap)
        # A thread of autograd's own may let go of Python objects while the interpreter ends, which
        # aborts the process.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for owner, name, replacement in patches:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield
