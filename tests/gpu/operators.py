"""How operators run on the pretend GPU: on the data of their tensors, by the CPU's kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from tests.gpu.log import note_kernel, note_read, recording
from tests.gpu.tensors import CPU, NAME, generators, host_of, on_device, point_to, to_device

aten = torch.ops.aten

# Operators that wait for the device on CUDA, beside copies, indexing by a mask and `item`.
WAITING = {
    "_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "_unique2", "bincount", "equal", "linalg_eig",
    "masked_select", "nonzero", "repeat_interleave", "unique_consecutive", "unique_dim",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
# What takes a CPU scalar beside pointwise operators.
SCALAR_OPERAND = ("masked_fill", "fill_", "floor_divide")
NO_KERNEL = {"_local_scalar_dense", "empty", "empty_strided", "resize_", "set_"}


class DeviceMixing(RuntimeError):
    """An operator was given tensors, or a generator, of two devices."""


class Operator(NamedTuple):
    """What the schema of an operator says.

    Attributes:
        func: the operator.
        name: without namespace and overload.
        is_view: its result shares the data of its argument.
        operands: which positional arguments are tensors.
        takes_scalars: a CPU scalar may be an operand.
        draws: it takes a generator.
    """

    func: Any
    name: str
    is_view: bool
    operands: tuple[bool, ...]
    takes_scalars: bool
    draws: bool


def about(func: Any) -> Operator:
    """What the schema of an operator says."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    return Operator(
        func,
        name,
        any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns),
        tuple(isinstance(argument.type, torch._C.TensorType) for argument in schema.arguments),
        torch.Tag.pointwise in func.tags or name.startswith(SCALAR_OPERAND),
        any(argument.name == "generator" for argument in schema.arguments),
    )


def _leaves(value: Any) -> list[Any]:
    """The entries of arguments or results: operators nest nothing deeper than lists."""
    found = []
    for entry in value if isinstance(value, list | tuple) else (value,):
        if isinstance(entry, list | tuple):
            found += entry
        else:
            found.append(entry)
    return found


def _map(fn: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_map(fn, entry) for entry in value])
    return fn(value)


def check_devices(operator: Operator, tensors: list[Tensor]) -> None:
    """As on CUDA: a CPU scalar may be an operand of a pointwise operator, nothing else may be mixed."""
    strangers = [t for t in tensors if t.is_cpu]
    if not strangers:
        return
    func = operator.func
    if operator.takes_scalars and (on_device(tensors[0]) or not func._schema.arguments[0].is_write):
        strangers = [t for t in strangers if t.ndim > 0]
    if strangers:
        shapes = [tuple(t.shape) for t in strangers]
        raise DeviceMixing(f"{func}: tensors of {NAME} and of the CPU, the latter of shapes {shapes}")


def _check_generators(func: Any, leaves: list[Any]) -> None:
    for leaf in leaves:
        if isinstance(leaf, torch._C.Generator) and leaf._cdata not in generators:
            raise DeviceMixing(f"{func}: expected a generator of {NAME}, got one of {leaf.device}")


def _note_reads(operator: Operator, args: tuple[Any, ...], tensors: list[Tensor]) -> bool:
    """Notes what makes the host wait; True if it may mix devices."""
    func, name = operator.func, operator.name
    if name == "copy_":
        here, there = (on_device(t) for t in tensors[:2])
        if there and not here:
            note_read("to_host", func)
        elif here and not there and not getattr(tensors[1].untyped_storage(), "pinned", False):
            note_read("to_device", func)
        return True
    if name in INDEXING:
        indices = [i for i in args[1] if i is not None]
        # One value put where a mask is true is a masked_fill, which does not wait.
        fills = len(args) > 2 and args[2].numel() == 1
        if not fills and any(i.dtype in {torch.bool, torch.uint8} for i in indices):
            note_read("bool_index", func)
        if not all(on_device(i) for i in indices):
            note_read("index_to_device", func)
        check_devices(operator, [args[0], *args[2:3]])
        return True
    if name == "_local_scalar_dense":
        note_read("item", func)
    elif name in WAITING:
        note_read("wait", func)
    return False


def _flops(func: Any, args: Any, kwargs: Any, tensors: list[Tensor], results: list[Tensor]) -> int:
    """Of products by torch's formulas, of factorisations by theirs; one for each number elsewhere."""
    packet = func._overloadpacket
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=results[0] if results else None)
    if packet in {aten.linalg_cholesky_ex, aten.linalg_inv_ex}:
        return tensors[0].numel() * tensors[0].shape[-1] // (1 if packet is aten.linalg_inv_ex else 3)
    if packet is aten.linalg_solve_triangular:
        return tensors[1].numel() * tensors[0].shape[-1]
    return max([t.numel() for t in results or tensors], default=0)


def _number_as_tensor(number: float, other: Tensor) -> Tensor:
    """A number where a tensor belongs, in a tensor that promotes dtypes as the number would.

    The dispatcher hands such operands to Python as numbers, and not every operator takes them back.
    """
    dtype = torch.result_type(other, number)
    exact = other.ndim > 0 and dtype == other.dtype and isinstance(number, float)
    return torch.tensor(number, dtype=torch.float64 if exact else dtype)


def run(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    """Runs an operator of the device on the data of its tensors."""
    func, name, is_view, operands, _, draws = operator
    if is_view or name == "set_":
        return func._op_dk(CPU, *args, **kwargs)  # metadata alone
    leaves = _leaves((*args, *kwargs.values()))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not _note_reads(operator, args, tensors):
        check_devices(operator, tensors)
    if draws:
        _check_generators(func, leaves)
    hosts: dict[int, tuple[Tensor, Tensor]] = {}

    def unwrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_cpu:
            return leaf
        host = host_of(leaf)
        hosts[id(host)] = host, leaf
        return host

    def wrap(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        if id(result) in hosts:
            return hosts[id(result)][1]
        return result if name == "copy_" else to_device(result)

    host_args = [_map(unwrap, arg) for arg in args]
    for i, arg in enumerate(args):
        if operands[i] and isinstance(arg, int | float):
            host_args[i] = _number_as_tensor(arg, tensors[-1])
    host_kwargs = {key: _map(unwrap, value) for key, value in kwargs.items()}
    if "device" in kwargs:
        host_kwargs.update(device="cpu", pin_memory=None)
    with torch._C._ExcludeDispatchKeyGuard(_CPU_AUTOCAST):
        out = func(*host_args, **host_kwargs)
    if func._schema.is_mutable:
        for host, t in hosts.values():
            if host.shape != t.shape:
                point_to(t, host)
    # A copy from or to the CPU is no kernel.
    if recording() and name not in NO_KERNEL and not (name == "copy_" and len(hosts) < 2):
        results = [t for t in _leaves(out) if isinstance(t, Tensor)]
        dtype = next((t.dtype for t in (*tensors, *results) if t.is_floating_point()), None)
        note_kernel(name, _flops(func, args, kwargs, tensors, results), dtype)
    return _map(wrap, out)


_CPU_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_SDPA = about(aten.scaled_dot_product_attention.default)


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
    check_devices(_SDPA, given)
    fused = not enable_gqa and query.ndim == 4 and not any(mask.requires_grad for mask in given[3:])
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


def register() -> torch.library.Library:
    """Gives the device the CPU's operators, as long as what is returned is kept."""
    library = torch.library.Library("aten", "IMPL")
    for full_name in torch._C._dispatch_get_all_op_names():
        space, _, name = full_name.partition("::")
        own = torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CPU") or name == "copy_"
        if space == "aten" and (own or name.startswith("_foreach_")):
            packet, _, overload = name.partition(".")
            func = getattr(getattr(aten, packet), overload or "default")
            library.impl(name, functools.partial(run, about(func)), "PrivateUse1")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)
    return library
