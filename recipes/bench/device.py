"""What differs between devices: how to wait for one, and what it can say about memory and kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from training.errors import BadInput, first_line


@dataclass(frozen=True)
class Counts:
    """Host reads (waits of the host for the device) and kernels of a piece of work; None: unknown."""

    host_reads: int | None
    kernels: int | None


def device_of(name: str) -> torch.device:
    """The device of that name, ready for use.

    Raises:
        BadInput: there is no such device here.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BadInput(f"--device must be one of torch's, got {name!r}: {first_line(error)}") from error
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
    # What ran on the GPU; ranges that code has named are not work.
    kernels = sum(
        event.device_type == DeviceType.CUDA and not event.is_user_annotation
        for event in record.events() or ()
    )
    return Counts(reads, kernels or None)


# By device type; a type that is not here is not counted.
COUNTERS: dict[str, Callable[[Callable[[], object]], Counts]] = {"cuda": cuda_counts}


def counts(device: torch.device, work: Callable[[], object]) -> Counts:
    """Host reads and kernels of the work, None where nothing counts them."""
    counter = COUNTERS.get(device.type)
    return Counts(None, None) if counter is None else counter(work)
