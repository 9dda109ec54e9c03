"""Tensors, storages and generators of the pretend GPU.

A tensor of the device has a storage without data; an attribute of the storage, which lives as long as
it does, is the CPU storage with the data. So views, `.data` and saved tensors share what they should.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

NAME = "pretend"
CPU = torch._C.DispatchKey.CPU
_SET = torch.ops.aten.set_.source_Storage_storage_offset


def on_device(value: Any) -> bool:
    """Whether value is a tensor of the device, or names the device."""
    if isinstance(value, Tensor):
        return value.device.type == NAME
    return isinstance(value, torch.device) and value.type == NAME


class _Storage(Tensor):
    """Lends its storage, of so many bytes and without data, to a tensor of the device."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def storage_of(data: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage of the device that holds data, of the CPU."""
    lender = Tensor._make_wrapper_subclass(
        _Storage, (0,), dtype=torch.uint8, device=f"{NAME}:0", storage_size=data.nbytes()
    )
    storage = lender.untyped_storage()
    storage.host = data
    return storage


def point_to(t: Tensor, host: Tensor) -> Tensor:
    """Makes t, of the device, hold the data of host: the link is an attribute of the storage."""
    storage = storage_of(host.untyped_storage())
    return _SET._op_dk(CPU, t, storage, host.storage_offset(), host.size(), host.stride())


def to_device(host: Tensor) -> Tensor:
    """A tensor of the device that shares the data of host, on the CPU; notes nothing."""
    return point_to(torch._C._acc.create_empty_tensor((0,), host.dtype), host)


def host_of(t: Tensor) -> Tensor:
    """The CPU tensor that shares the data of t, of the device; notes nothing."""
    with torch._C.DisableTorchFunctionSubclass():
        # Of the data: a subclass may say another of itself (lipformer.functional.wide).
        dtype = torch._C.TensorBase.dtype.__get__(t)  # type: ignore[attr-defined]
    host = torch.empty(0, dtype=dtype)
    return host.set_(t.untyped_storage().host, t.storage_offset(), t.size(), t.stride())


# By the address of their C++ part: operators get new Python objects.
generators: weakref.WeakValueDictionary[int, Generator] = weakref.WeakValueDictionary()


class Generator(torch._C.Generator):
    """torch.Generator, with generators of the device too: these draw as the CPU's do."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        pretend = torch.device(device).type == NAME
        generator = super().__new__(cls, "cpu" if pretend else device)
        if pretend:
            generators[generator._cdata] = generator
        return generator

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0) if self._cdata in generators else super().device


def pin_memory(t: Tensor, device: Any = None) -> Tensor:
    """Marks a copy as pinned: moving it to the device does not make the host wait."""
    pinned = t.clone()
    pinned.untyped_storage().pinned = True
    return pinned


class StorageMethods:
    """Methods of UntypedStorage that know the device: for copy.deepcopy, torch.save and torch.load."""

    original_to = torch.UntypedStorage.to
    original_cpu = torch.UntypedStorage.cpu
    original_clone = torch.UntypedStorage.clone
    original_data_ptr = torch.UntypedStorage.data_ptr

    def cpu(self: Any) -> torch.UntypedStorage:
        return self.host.clone() if self.device.type == NAME else StorageMethods.original_cpu(self)

    def clone(self: Any) -> torch.UntypedStorage:
        if self.device.type == NAME:
            return storage_of(self.host.clone())
        return StorageMethods.original_clone(self)

    def to(self: Any, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        if torch.device(device).type == NAME:
            return storage_of(self.cpu().clone())
        return StorageMethods.original_to(self, device=device, non_blocking=non_blocking)

    def data_ptr(self: Any) -> int:
        storage = self.host if self.device.type == NAME else self
        return StorageMethods.original_data_ptr(storage)
