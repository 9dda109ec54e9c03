"""Runs cases on a device, in a process of its own, and prints one JSON line for each.

    python -m tests.gpu.worker pretend layers           all cases of tests/gpu/cases_layers.py
    python -m tests.gpu.worker cuda layers TokenShift   those with this in their name, on a real GPU

Each case is run on the CPU and on the device, from one seed; results and gradients are compared. What
trains is run twice, with new inputs the second time, which is the one that is watched.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu import pretend
from tests.gpu.case import Case, build

TOLERANCE = 2e-4


@contextlib.contextmanager
def watched(device: str) -> Iterator[list[str]]:
    """Collects where the host waits for the device; on CUDA the first such place raises."""
    found: list[str] = []
    if device == pretend.NAME:
        with pretend.record() as log:
            yield found
        found += [f"{read.kind} in {read.operator} at {read.where}" for read in log.reads]
    elif device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        yield found


def on(device: str, value: Any) -> Any:
    """Tensors and modules of a container, on the device."""
    return tree_map(lambda v: v.to(device) if isinstance(v, Tensor | nn.Module) else v, value)


def numbers(result: Any) -> list[Tensor]:
    """All numbers of a result, in float64 on the CPU."""
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor | float | int)]
    return [torch.as_tensor(leaf).detach().cpu().double() for leaf in leaves]


def train(module: Any, result: Any, inputs: list[Tensor]) -> list[Tensor]:
    """The gradients of a loss of all results."""
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
    outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    loss = torch.stack([(t.float() * t.detach().float().cos()).sum() for t in outputs]).sum()
    return [
        g for g in torch.autograd.grad(loss, [*parameters, *inputs], allow_unused=True) if g is not None
    ]


def outcome(case: Case, device: str) -> tuple[list[Tensor], list[str]]:
    """The numbers of both runs on a device, and where the second made the host wait."""
    torch.manual_seed(0)
    module = build(case.spec)
    if isinstance(module, nn.Module):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        module = module.to(device)
    found: list[Tensor] = []
    for _ in range(2 if case.trains else 1):
        drawn = [draw() if callable(draw) else draw for draw in (*case.inputs, *case.named.values())]
        given = on(device, drawn)
        leaves = [t for t in tree_leaves(given) if isinstance(t, Tensor) and t.is_floating_point()]
        tracked = [t.requires_grad_() for t in leaves[:1]] if case.trains else []
        count = len(case.inputs)
        with watched(device if case.trains else "nothing") as reads:
            named = dict(zip(case.named, given[count:], strict=True))
            result = case.call(module, *given[:count], **named)
            gradients = train(module, result, tracked) if case.trains else []
        found += numbers(result) + numbers(gradients)
    return found, reads


def difference(found: list[Tensor], expected: list[Tensor]) -> str | None:
    """What is wrong with results, or None."""
    if len(found) != len(expected):
        return f"{len(found)} results, on the CPU {len(expected)}"
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours.shape != theirs.shape:
            return f"result {i} has shape {tuple(ours.shape)}, on the CPU {tuple(theirs.shape)}"
        if not ours.isfinite().all():
            return f"result {i} is not finite"
        if ours.numel() and not torch.allclose(
            ours, theirs, rtol=TOLERANCE, atol=TOLERANCE * max(1.0, float(theirs.abs().max()))
        ):
            return f"result {i} differs from the CPU's by {float((ours - theirs).abs().max()):.2g}"
    return None


def report(name: str, case: Case, device: str) -> dict[str, Any]:
    """One line: the case, its error or None, and where the host waits."""
    error, reads = None, []
    try:
        found, reads = outcome(case, device)
        expected, _ = outcome(case, "cpu")
        if device in case.compared:
            error = difference(found, expected)
        elif [t.shape for t in found] != [t.shape for t in expected]:
            error = "shapes differ from the CPU's"
    except Exception as failure:
        frames = traceback.extract_tb(failure.__traceback__)
        own = [
            f"{Path(f.filename).name}:{f.lineno}" for f in frames if "site-packages" not in f.filename
        ]
        error = f"{type(failure).__name__}: {str(failure)[:500]} (at {' > '.join(own[-7:])})"
    return {"case": name, "error": error, "reads": reads}


def main(device: str, group: str, part: str = "") -> None:
    """Prints the lines of a group."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
    cases: dict[str, Case] = getattr(importlib.import_module(f"tests.gpu.cases_{group}"), group.upper())
    with pretend.device() if device == pretend.NAME else contextlib.nullcontext():
        for name, case in cases.items():
            if part in name:
                print(json.dumps(report(name, case, device)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
