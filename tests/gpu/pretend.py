"""A pretend GPU: the device "pretend", whose tensors hold CPU data and which behaves as a GPU would.

It is torch's PrivateUse1 backend written in Python. Its tensors are ordinary ones: modules, autograd,
torch.func and optimisers treat them as those of any device. Mixing devices raises; each read by the
host and each copy is noted with its kind, operator, file and line; kernels (what runs on the device and
is not a view or an allocation) are counted by name, and floating-point operations by dtype.

The name of the backend is global to a process and cannot be taken back, so pytest never imports this:
tests start processes that do (`worker.py`). What is patched, is patched inside :func:`device` alone::

    with device(), record() as log:
        loss = model.to("pretend")(x.to("pretend")).sum()
        loss.backward()
    log.reads, sum(log.kernels.values()), log.flops[torch.float64]

A command line that trains on it, with Lightning's accelerator "pretend" (see `accelerator.py`)::

    python -m tests.gpu.run training fit --config recipes/quickstart.yaml --trainer.accelerator pretend

What it cannot show: time, memory, rounding (kernels are the CPU's), kernels of NVIDIA's libraries, and
what CUDA does asynchronously.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
from torch.utils.flop_counter import flop_registry

from tests.gpu import autocast

NAME = "pretend"
ROOT = Path(__file__).resolve().parents[2]
aten = torch.ops.aten

# Operators that wait for the device on CUDA, beside copies, indexing by a mask and `item`.
WAITING = {
    "_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "_unique2", "bincount", "equal", "linalg_eig",
    "masked_select", "nonzero", "repeat_interleave", "unique_consecutive", "unique_dim",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
# What takes a CPU scalar beside pointwise operators.
SCALAR_OPERAND = ("aten::masked_fill", "aten::fill_", "aten::floor_divide")
NO_KERNEL = {"_local_scalar_dense", "empty", "empty_strided", "resize_", "set_"}


class DeviceMixing(RuntimeError):
    """An operator was given tensors, or a generator, of two devices."""


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
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts and path != Path(__file__):
            lines.append(f"{path.relative_to(ROOT)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines) or "(the autograd engine or torch)"


def _note(kind: str, func: Any) -> None:
    if _logs:
        read = Read(kind, str(func), _where())
        for log in _logs:
            log.reads.append(read)


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


def _storage(data: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage of the device that holds data, of the CPU."""
    lender = Tensor._make_wrapper_subclass(
        _Storage, (0,), dtype=torch.uint8, device=f"{NAME}:0", storage_size=data.nbytes()
    )
    storage = lender.untyped_storage()
    storage.host = data
    return storage


_SET = aten.set_.source_Storage_storage_offset
_CPU = torch._C.DispatchKey.CPU


def _point_to(t: Tensor, host: Tensor) -> Tensor:
    """Makes t, of the device, hold the data of host: the link is an attribute of the storage."""
    storage = _storage(host.untyped_storage())
    return _SET._op_dk(_CPU, t, storage, host.storage_offset(), host.size(), host.stride())


def to_device(host: Tensor) -> Tensor:
    """A tensor of the device that shares the data of host, on the CPU; notes nothing."""
    return _point_to(torch._C._acc.create_empty_tensor((0,), host.dtype), host)


def host_of(t: Tensor) -> Tensor:
    """The CPU tensor that shares the data of t, of the device; notes nothing."""
    host = torch.empty(0, dtype=t.dtype)
    return host.set_(t.untyped_storage().host, t.storage_offset(), t.size(), t.stride())


def _check_devices(func: Any, tensors: list[Tensor], generators: list[Any]) -> None:
    """As on CUDA: a CPU scalar may be an operand of a pointwise operator, nothing else may be mixed."""
    strangers = [t for t in tensors if not on_device(t)]
    takes_scalars = torch.Tag.pointwise in func.tags or func._schema.name.startswith(SCALAR_OPERAND)
    if takes_scalars and (on_device(tensors[0]) or not func._schema.arguments[0].is_write):
        strangers = [t for t in strangers if t.ndim > 0]
    if strangers:
        shapes = [tuple(t.shape) for t in strangers]
        raise DeviceMixing(f"{func}: tensors of {NAME} and of the CPU, the latter of shapes {shapes}")
    for generator in generators:
        if generator._cdata not in _generators:
            raise DeviceMixing(f"{func}: expected a generator of {NAME}, got one of {generator.device}")


def _note_reads(func: Any, name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> bool:
    """Notes what makes the host wait; True if func may mix devices."""
    if name == "copy_":
        here, there = (on_device(t) for t in tensors[:2])
        if there and not here:
            _note("to_host", func)
        elif here and not there and not getattr(tensors[1].untyped_storage(), "pinned", False):
            _note("to_device", func)
        return True
    if name in INDEXING:
        indices = [i for i in args[1] if i is not None]
        # One value put where a mask is true is a masked_fill, which does not wait.
        fills = len(args) > 2 and args[2].numel() == 1
        if not fills and any(i.dtype in {torch.bool, torch.uint8} for i in indices):
            _note("bool_index", func)
        if not all(on_device(i) for i in indices):
            _note("index_to_device", func)
        _check_devices(func, [args[0], *args[2:3]], [])
        return True
    if name == "_local_scalar_dense":
        _note("item", func)
    elif name in WAITING:
        _note("wait", func)
    return False


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Of products by torch's formulas, of factorisations by theirs; one for each number elsewhere."""
    packet = func._overloadpacket
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=out)
    first = next(t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
    if packet in {aten.linalg_cholesky_ex, aten.linalg_inv_ex}:
        return first.numel() * first.shape[-1] // (3 if packet is aten.linalg_cholesky_ex else 1)
    if packet is aten.linalg_solve_triangular:
        return args[1].numel() * first.shape[-1]
    return max([t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)], default=0)


@functools.cache
def _operands(func: Any) -> list[bool]:
    """Which positional arguments of an operator are tensors."""
    return [isinstance(argument.type, torch._C.TensorType) for argument in func._schema.arguments]


def _numbers_as_tensors(func: Any, args: tuple[Any, ...]) -> Iterator[Any]:
    """A number where a tensor belongs, in a tensor that promotes dtypes as the number would.

    The dispatcher hands such operands to Python as numbers, and not every operator takes them back.
    """
    for arg, operand in zip(args, _operands(func), strict=False):
        if operand and isinstance(arg, int | float):
            other = [t for t in args if isinstance(t, Tensor)][-1]
            dtype = torch.result_type(other, arg)
            exact = other.ndim > 0 and dtype == other.dtype and isinstance(arg, float)
            arg = torch.tensor(arg, dtype=torch.float64 if exact else dtype)
        yield arg


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operator of the device on the data of its tensors."""
    name = func._schema.name.removeprefix("aten::")
    if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
        return func._op_dk(_CPU, *args, **kwargs)  # a view: metadata alone
    if name == "set_":
        return func._op_dk(_CPU, *args, **kwargs)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    leaves, tree = tree_flatten((tuple(_numbers_as_tensors(func, args)), kwargs))
    if not _note_reads(func, name, args, tensors) and tensors:
        _check_devices(func, tensors, [g for g in leaves if isinstance(g, torch._C.Generator)])
    hosts: dict[int, tuple[Tensor, Tensor]] = {}

    def unwrap(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and on_device(leaf):
            host = host_of(leaf)
            hosts[id(host)] = host, leaf
            return host
        return torch.device("cpu") if on_device(leaf) else leaf

    def wrap(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        if id(result) in hosts:
            return hosts[id(result)][1]
        return result if name == "copy_" else to_device(result)

    host_args, host_kwargs = tree_unflatten([unwrap(leaf) for leaf in leaves], tree)
    if "pin_memory" in host_kwargs:
        host_kwargs["pin_memory"] = None
    with _autocast_off():
        out = func(*host_args, **host_kwargs)
    for host, t in hosts.values():
        if host.shape != t.shape:
            _point_to(t, host)
    if _logs and name not in NO_KERNEL and not (name == "copy_" and len(hosts) < 2):
        flops, dtype = _flops(func, args, kwargs, out), _floating(leaves, out)
        for log in _logs:
            log.kernels[name] += 1
            if dtype is not None:
                log.flops[dtype] += flops
    return tree_map(wrap, out)


def _floating(leaves: list[Any], out: Any) -> torch.dtype | None:
    """The floating-point dtype that an operator computed in, if any."""
    found = (t for t in [*leaves, *tree_leaves(out)] if isinstance(t, Tensor) and t.is_floating_point())
    return next((t.dtype for t in found), None)


def _autocast_off() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """SDPA as one fused kernel where the CPU has one, else by its operations."""
    given = [query, key, value] + ([] if attn_mask is None else [attn_mask])
    _check_devices(aten.scaled_dot_product_attention.default, given, [])
    fused = (
        not enable_gqa and query.ndim == 4 and not (attn_mask is not None and attn_mask.requires_grad)
    )
    if fused:
        shapes = [torch.empty_like(t, device="cpu").requires_grad_(t.requires_grad) for t in given[:3]]
        mask = None if attn_mask is None else torch.empty_like(attn_mask, device="cpu")
        options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        fused = torch._fused_sdp_choice(*shapes, attn_mask=mask, **options) == 1
    if not fused:
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


# By the address of their C++ part: operators get new Python objects.
_generators: weakref.WeakValueDictionary[int, _Generator] = weakref.WeakValueDictionary()


class _Generator(torch._C.Generator):
    """torch.Generator, with generators of the device too: these draw as the CPU's do."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        pretend = torch.device(device).type == NAME
        generator = super().__new__(cls, "cpu" if pretend else device)
        if pretend:
            _generators[generator._cdata] = generator
        return generator

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0) if self._cdata in _generators else super().device


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
def _register() -> list[Any]:
    """Names the backend and gives it the CPU's operators; returns what must be kept alive."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL")
    for full_name in torch._C._dispatch_get_all_op_names():
        space, _, name = full_name.partition("::")
        own = torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CPU") or name == "copy_"
        if space == "aten" and (own or name.startswith("_foreach_")):
            packet, _, overload = name.partition(".")
            func = getattr(getattr(aten, packet), overload or "default")
            library.impl(name, functools.partial(_run, func), "PrivateUse1")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)
    return [library, *autocast.register(NAME)]


def _pin_memory(t: Tensor, device: Any = None) -> Tensor:
    """Marks a copy as pinned: moving it to the device does not make the host wait."""
    pinned = t.clone()
    pinned.untyped_storage().pinned = True
    return pinned


class _OfStorages:
    """Methods of UntypedStorage that know the device: for copy.deepcopy, torch.save and torch.load."""

    original_to = torch.UntypedStorage.to
    original_cpu = torch.UntypedStorage.cpu
    original_clone = torch.UntypedStorage.clone
    original_data_ptr = torch.UntypedStorage.data_ptr

    def cpu(self: Any) -> torch.UntypedStorage:
        return self.host.clone() if self.device.type == NAME else _OfStorages.original_cpu(self)

    def clone(self: Any) -> torch.UntypedStorage:
        if self.device.type == NAME:
            return _storage(self.host.clone())
        return _OfStorages.original_clone(self)

    def to(self: Any, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        if torch.device(device).type == NAME:
            return _storage(self.cpu().clone())
        return _OfStorages.original_to(self, device=device, non_blocking=non_blocking)

    def data_ptr(self: Any) -> int:
        storage = self.host if self.device.type == NAME else self
        return _OfStorages.original_data_ptr(storage)


@contextlib.contextmanager
def device() -> Iterator[None]:
    """Makes the device usable: with generators of its own, pinned memory, saving and loading."""
    _register()
    swap = torch.__future__.get_swap_module_params_on_conversion()
    # `module.to` keeps the identity of parameters (and their ties), as it does on CUDA.
    torch.__future__.set_swap_module_params_on_conversion(True)
    patches = [
        (torch, "Generator", _Generator),
        (Tensor, "pin_memory", _pin_memory),
        (Tensor, "is_pinned", lambda t: getattr(t.untyped_storage(), "pinned", False)),
        (torch.accelerator, "synchronize", lambda device=None: None),
        *(
            (torch.UntypedStorage, name, getattr(_OfStorages, name))
            for name in ("cpu", "clone", "to", "data_ptr")
        ),
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swap)
        for owner, name, replacement in patches:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield
