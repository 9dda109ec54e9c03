"""What a bug report starts with: ``python -m lipformer`` prints versions, devices and a self-check.

The exit code is 1 if a check fails.
"""

from __future__ import annotations

import copy
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import lipformer as lf

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONAL = (
    *("numpy", "safetensors", "transformers", "lightning", "onnx"),
    *("FrEIA", "nflows", "normflows", "pyro-ppl", "zuko"),
)


def devices() -> list[torch.device]:
    """The CPU, and the accelerator that torch would use if there is one."""
    found = [torch.device("cpu")]
    if torch.accelerator.is_available():
        found.append(torch.device(torch.accelerator.current_accelerator() or "cpu"))
    return found


def fused_backends(device: torch.device) -> list[str]:
    """The backends of scaled_dot_product_attention that L2 attention runs on, with their dtypes.

    Each is tried, forward and backward. Devices other than the CPU and CUDA may ignore the choice.
    """
    lines = []
    for name, backend in BACKENDS.items():
        taken = []
        for dtype in DTYPES:
            y = torch.randn(1, 2, 8, 16, device=device, dtype=dtype, requires_grad=True)
            try:
                with warnings.catch_warnings(), sdpa_kernel(backend):
                    warnings.simplefilter("ignore")  # torch warns why it does not take a kernel
                    lf.functional.l2_attention(y).sum().backward()
            except RuntimeError:
                continue
            taken.append(str(dtype).removeprefix("torch."))
        if taken:
            lines.append(f"{name} ({', '.join(taken)})")
    return lines


def facts() -> Iterator[tuple[str, str]]:
    """What a bug report needs to know of the machine, by name."""
    yield "lipformer", lf.__version__
    yield "python", f"{platform.python_version()}, {platform.platform()}"
    yield "torch", f"{torch.__version__}, threads: {torch.get_num_threads()}"
    for device in devices():
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        yield "device", f"{device} ({name}), attention by {', '.join(fused_backends(device))}"
    versions = []
    for package in ("einops", *OPTIONAL):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    yield "packages", ", ".join(versions)


@torch.no_grad()
def check_attention(device: torch.device) -> tuple[bool, str]:
    """Whether the layer's fused kernel gives what the definition says, computed in float64."""
    layer = lf.L2MultiheadAttention(16, 2, batch_first=True, device=device)
    x = torch.randn(1, 8, 16, device=device)
    wide = copy.deepcopy(layer).cpu().double()
    keys = wide.q_proj(x.cpu().double()).unflatten(-1, (2, 8)).transpose(1, 2)
    logits = -wide.temperature * torch.cdist(keys, keys).square()
    error = 0.0
    for causal in (False, True):
        later = torch.ones(8, 8).triu(1).bool() & causal
        heads = logits.masked_fill(later, -torch.inf).softmax(-1) @ keys
        meant = wide.out_proj(heads.transpose(1, 2).flatten(-2))
        given = layer(x, need_weights=False, is_causal=causal)[0].cpu().double()
        # Not max(), which passes NaN by.
        error += (given - meant).abs().max().item()
    return error <= 1e-3, f"off the definition by {error:.2g}"


def check_certificate(device: torch.device) -> tuple[bool, str]:
    """Whether an attack on a random layer stays below its certificate."""
    # In float64: derivatives of the attack's two kinds must agree.
    attention = lf.L2MultiheadAttention(16, 2, batch_first=True, device=device).double()
    bound = lf.certify(attention, seq_len=8).bound
    x = torch.randn(1, 8, 16, device=device).double()
    reached = lf.attack_lipschitz(attention, x, steps=20, restarts=2).value
    return reached <= bound, f"an attack reaches {reached:.3g}, certified {bound:.3g}"


@torch.no_grad()
def check_inverse(device: torch.device) -> tuple[bool, str]:
    """Whether the inverse of a block returns its input, as near as its record promises."""
    attention = lf.L2MultiheadAttention(16, 2, batch_first=True, device=device)
    block = lf.InvertibleResidual(attention, coeff=0.9, seq_len=8)
    x = torch.randn(4, 8, 16, device=device)
    y = block.double()(x.double())  # in float32 y would be of another input, by its rounding
    error = (block.inverse(y) - x).flatten(1).norm(dim=1).max().item()
    assert block.record is not None
    promised = block.record.error_bound.max().item()
    return error <= promised, f"error {error:.2g}, promised {promised:.2g}"


CHECKS: dict[str, Callable[[torch.device], tuple[bool, str]]] = {
    "attention": check_attention,
    "certificate": check_certificate,
    "inverse": check_inverse,
}


def main() -> int:
    """Prints the facts and the checks; 1 if one of these fails, else 0."""
    torch.manual_seed(0)
    for name, fact in facts():
        print(f"{name:<12}{fact}")
    failed = False
    for device in devices():
        for name, check in CHECKS.items():
            try:
                passed, told = check(device)
            except Exception as error:  # a report of it is what this command is for
                passed, told = False, f"{type(error).__name__}: {error}"
            failed |= not passed
            print(f"{name:<12}{'passed' if passed else 'FAILED'} on {device}: {told}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
