"""Which kernels scaled_dot_product_attention has for the calls that a layer makes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from training.errors import first_line

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_FUSED = "aten::_scaled_dot_product_"
# Query, key and value (B, H, N, E) of a call, and its options.
Call = tuple[tuple[Tensor, ...], dict[str, Any]]


@dataclass(frozen=True)
class Trial:
    """What became of a call: the kernel that ran, if one did, whether backward too, and why not."""

    kernel: str | None
    backward: bool
    reason: str

    def __str__(self) -> str:
        if self.backward:
            return "forward, backward"
        return "no" if self.kernel is None else "forward only"


class _FusedKernels(TorchDispatchMode):
    """Keeps the names of the fused attention kernels that run; the math path has none."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name: str = func._schema.name
        if name.startswith(_FUSED):
            self.found.append(name.removeprefix(_FUSED).replace("_attention", ""))
        return func(*args, **(kwargs or {}))


def call_of(layer: nn.Module, x: Tensor) -> Call:
    """The one call that a layer makes for the tokens x (B, N, D)."""
    real = F.scaled_dot_product_attention
    with mock.patch.object(F, "scaled_dot_product_attention", wraps=real) as spy, torch.no_grad():
        layer(x)
    (call,) = spy.call_args_list
    return call.args, dict(call.kwargs)


def attempt(call: Call, backend: str = "chosen") -> Trial:
    """Repeats a call, forward and backward, with one of BACKENDS alone or as torch has "chosen"."""
    tensors, options = call
    query, key, value = (t.clone().requires_grad_() for t in tensors)
    kernel = None
    kernels = _FusedKernels()
    allowed = sdpa_kernel(BACKENDS[backend]) if backend in BACKENDS else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as caught:
        # torch warns why it does not take a kernel.
        warnings.simplefilter("always")
        try:
            with allowed, kernels:
                out = F.scaled_dot_product_attention(query, key, value, **options)
            kernel = (kernels.found or ["math"])[0]
            if backend in BACKENDS and not kernel.startswith(backend):
                # A device may know nothing of these backends.
                return Trial(None, False, f"{kernel} ran instead")
            out.backward(torch.ones_like(out))
        except RuntimeError as error:
            reasons = [first_line(error), *(str(warning.message) for warning in caught)]
            return Trial(kernel, False, "; ".join(reasons))
    return Trial(kernel, True, "")
