"""What differs between devices: how to wait for one, and what it can say about memory and kernels."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from training.errors import BadInput, first_line


@dataclass(frozen=True)
class Counts:
    """Host reads (waits of the host for the device) and kernels of a piece of work; None: unknown."""

    host_reads: int | None
    kernels: int | None


def device_of(name: str | None) -> torch.device:
    """The device of that name, ready for use; CUDA if there is no name.

    Raises:
        BadInput: there is no such device here.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    allowed = " or ".join([*([] if found is None else [found.type]), "cpu"])
    if name is None and not torch.cuda.is_available():
        raise BadInput(f"no CUDA device was found; --device must be {allowed}")
    try:
        device = torch.device(name or "cuda")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BadInput(f"--device must be {allowed}, got {name!r}: {first_line(error)}") from error
    if device.index:
        # What follows speaks to the current device, which is the first unless another is set.
        torch.get_device_module(device).set_device(device)
    return device


def device_facts(device: torch.device) -> dict[str, str]:
    """What a device says of itself, and the versions and settings of its kernels."""
    module = torch.get_device_module(device)
    facts = {"device": str(device)}
    for name in ("get_device_name", "get_device_capability", "get_device_properties"):
        if hasattr(module, name):
            facts[name.removeprefix("get_")] = str(getattr(module, name)(device))
    if device.type == "cuda":
        facts["cuda"] = str(torch.version.cuda or torch.version.hip)
        facts["cudnn"] = str(torch.backends.cudnn.version())
    facts["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    return facts


def waiting_clock(device: torch.device) -> Callable[[], float]:
    """A clock that first waits for all that was launched: it times the work and not its launch."""
    synchronize = torch.get_device_module(device).synchronize

    def clock() -> float:
        synchronize()
        return time.perf_counter()

    return clock


def peak_memory(device: torch.device, work: Callable[[], object]) -> int | None:
    """Bytes that the work takes at most on top of what was held before; None where none are counted."""
    module = torch.get_device_module(device)
    if not hasattr(module, "max_memory_allocated"):
        return None
    module.synchronize()
    module.reset_peak_memory_stats()
    before: int = module.memory_allocated()
    work()
    peak: int = module.max_memory_allocated()
    return peak - before


def cuda_counts(work: Callable[[], object]) -> Counts:
    """Counts by CUDA's own means; the work runs twice.

    Reads are the warnings of torch's debug mode, which does not see every kind. Kernels are what the
    profiler saw, copies and fills included; if it saw none, it does not work here.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    reads = sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        work()
        torch.cuda.synchronize()
    return Counts(reads, launches(record.events() or ()) or None)


def launches(events: Iterable[Any]) -> int:
    """How many of the profiler's events ran on the GPU; ranges that code has named are not work."""
    return sum(e.device_type == DeviceType.CUDA and not e.is_user_annotation for e in events)


# By device type; a type that is not here is not counted.
COUNTERS: dict[str, Callable[[Callable[[], object]], Counts]] = {"cuda": cuda_counts}


def counts(device: torch.device, work: Callable[[], object]) -> Counts:
    """Host reads and kernels of the work, None where nothing counts them."""
    counter = COUNTERS.get(device.type)
    return Counts(None, None) if counter is None else counter(work)
