"""All figures of one GPU in one run, to be reported: docs/gpu.md says how.

    python -m recipes.bench.gpu [--device cuda] [--output DIRECTORY] [--seconds 10] [--smoke]

Prints tables and writes gpu.json and gpu.md: the device; the attention kernels that torch has for our
calls; time and memory of the layers; training steps of every language model with their host reads and
kernels; errors against float64; certificates against attacks. What fails is reported, the rest goes on,
and the exit code is 1. Leave the GPU alone meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lipformer as lf
from recipes.bench.device import Counts, counts, device_facts, device_of, peak_memory
from recipes.bench.peers import OutputOnly, Shape, lean, variant
from recipes.bench.sdpa import BACKENDS, attempt, call_of
from recipes.bench.timing import Step, environment, interleave
from recipes.bench.timing import training_step as layer_step
from recipes.bench.training import BASELINE, RECIPES, model_of
from recipes.bench.training import training_step as model_step
from recipes.output import exit_code, markdown, parser, show, usable_directory, write_text
from training.errors import first_line

HEAD_WIDTHS = (32, 64, 128)
DTYPES = (torch.bfloat16, torch.float32)
LAYERS = ("mha", "sdpa", "lean", "paper", "lean_alibi")
_MEGABYTE = 2**20

Row = dict[str, Any]


class Failure(str):
    """What is in the cell of something that failed and should not have."""


@dataclass(frozen=True)
class Section:
    """A title, what a reader must know, and rows that have the same keys; None: not measured."""

    title: str
    note: str
    rows: list[Row]

    def failed(self) -> bool:
        """Whether a cell holds a failure."""
        return any(isinstance(value, Failure) for row in self.rows for value in row.values())


@dataclass(frozen=True)
class Sizes:
    """How large all is. ``model`` changes what the recipes say."""

    tokens: int = 16384
    lengths: tuple[int, ...] = (256, 1024, 4096, 16384)
    dim: int = 512
    heads: int = 8
    error_length: int = 1024
    attack_length: int = 64
    attack_steps: int = 60
    attack_restarts: int = 16
    recipes: Path = RECIPES.parent
    model: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 64
    block: int = 288
    repetitions: int = 3


FULL = Sizes()
SMOKE = Sizes(
    tokens=16,
    lengths=(16,),
    dim=16,
    heads=2,
    error_length=16,
    attack_length=6,
    attack_steps=1,
    attack_restarts=1,
    recipes=RECIPES,
    model={"dim": 16, "num_heads": 2, "num_layers": 1},
    batch=1,
    block=8,
    repetitions=1,
)


@dataclass(frozen=True)
class Bench:
    """What every part needs to know."""

    device: torch.device
    sizes: Sizes
    seconds: float
    compiled: bool

    def tokens(self, length: int, dim: int, batch: int = 1) -> Tensor:
        """Tokens of a normal distribution (batch, length, dim), the same on every device."""
        x = torch.randn(batch, length, dim, generator=torch.Generator().manual_seed(0))
        return x.to(self.device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def device_section(bench: Bench) -> Section:
    """The device and the versions."""
    run = {"smoke": bench.sizes is SMOKE, "seconds": bench.seconds, "compiled": bench.compiled}
    facts = {**device_facts(bench.device), **environment(), **run}
    rows = [{"fact": name, "value": value} for name, value in facts.items()]
    return Section("Device", "What the figures depend on besides the code.", rows)


def kernel_section(bench: Bench) -> Section:
    """Which kernels there are for the calls of a plain and of our layers."""
    rows: list[Row] = []
    reasons: dict[str, list[int]] = {}
    n = bench.sizes.lengths[0]
    for key in ("sdpa", "lean", "lean_alibi"):
        for dtype in DTYPES:
            for width in HEAD_WIDTHS:
                layer = variant(key).build(Shape(2 * width, 2, n)).to(bench.device, dtype)
                call = call_of(layer, bench.tokens(n, 2 * width, batch=2).to(dtype))
                trials = {name: attempt(call, name) for name in ("chosen", *BACKENDS)}
                for name, trial in trials.items():
                    if trial.reason:
                        reasons.setdefault(f"{name}: {trial.reason}", []).append(call[0][0].shape[-1])
                rows.append(
                    {
                        "layer": variant(key).label,
                        "dtype": _name(dtype),
                        "d": width,
                        "width in the kernel": call[0][0].shape[-1],
                        **{name: str(trial) for name, trial in trials.items()},
                        "chosen": f"{trials['chosen'].kernel}, {trials['chosen']}",
                    }
                )
    notes = [f"Causal, {n} tokens: torch's choice, and each backend when it is the only one allowed."]
    notes += [f"- {why} (widths {sorted(set(widths))})" for why, widths in reasons.items()]
    return Section("Kernels of scaled_dot_product_attention", "\n".join(notes), rows)


def compare(bench: Bench, build: dict[str, Callable[[], Step]], baseline: str) -> dict[str, Row]:
    """Time, memory, host reads and kernels of steps, beside those of one of them.

    A step that fails has the reason in its first cell, and the others go on.
    """
    steps: dict[str, Step] = {}
    failures: dict[str, str] = {}
    used: dict[str, tuple[int | None, Counts]] = {}
    for name, make in build.items():
        try:
            step = make()
            step()  # the first run makes what later ones keep
            used[name] = peak_memory(bench.device, step), counts(bench.device, step)
            steps[name] = step
        except torch.OutOfMemoryError:
            failures[name] = "out of memory"
        except RuntimeError as error:
            failures[name] = Failure(f"failed: {first_line(error)}")
    repetitions = bench.sizes.repetitions
    samples = interleave(steps, seconds=bench.seconds, min_repetitions=repetitions)
    usual = used[baseline][1].kernels if baseline in used else None
    rows: dict[str, Row] = {}
    for name in build:
        peak, counted = used.get(name, (None, Counts(None, None)))
        ratio = samples.ratio(name, baseline)
        seconds = samples.median(name) if name in steps else math.nan
        rows[name] = {
            "ms": seconds * 1e3,
            "steps/s": 1.0 / seconds,
            f"time, × {baseline}": ratio and ratio.median,
            "quartiles": ratio and f"{ratio.low:.3f} to {ratio.high:.3f} of {ratio.count}",
            "peak MB": None if peak is None else peak / _MEGABYTE,
            "host reads": counted.host_reads,
            "kernels": counted.kernels,
            f"kernels, × {baseline}": counted.kernels and usual and counted.kernels / usual,
        }
        if name in failures:
            rows[name] = {**dict.fromkeys(rows[name], "-"), "ms": failures[name]}
    return rows


def layer_section(bench: Bench) -> Section:
    """Time and memory of whole causal layers, forward and backward."""
    sizes, rows = bench.sizes, []
    for dtype in DTYPES:
        for n in sizes.lengths:
            print(f"layers, {_name(dtype)}, N = {n}", file=sys.stderr)
            x = bench.tokens(n, sizes.dim, batch=sizes.tokens // n).to(dtype)
            shape = Shape(sizes.dim, sizes.heads, n)

            def make(key: str, x: Tensor = x, shape: Shape = shape) -> Step:
                return layer_step(variant(key).build(shape).to(x.device, x.dtype), x)

            found = compare(bench, {key: partial(make, key) for key in LAYERS}, "sdpa")
            for key, row in found.items():
                rows.append({"dtype": _name(dtype), "N": n, "layer": variant(key).label, **row})
    note = (
        f"Forward and backward, {sizes.tokens} tokens, D = {sizes.dim}, H = {sizes.heads}, causal; "
        f"sdpa is the {variant('sdpa').label}. Memory is what a pass takes on top of weights and input."
    )
    return Section("Layers", note, rows)


def training_section(bench: Bench) -> Section:
    """Whole training steps of every language model, with host reads and kernels."""
    sizes, rows = bench.sizes, []
    precisions: dict[str, AbstractContextManager[Any]] = {
        "bf16-mixed": torch.autocast(bench.device.type, torch.bfloat16),
        "float32": contextlib.nullcontext(),
    }
    for precision, context in precisions.items():
        print(f"training steps, {precision}", file=sys.stderr)

        def make(recipe: str, context: AbstractContextManager[Any] = context) -> Step:
            model = model_of(sizes.recipes / f"{recipe}.yaml", sizes.block, **sizes.model)
            step = model_step(model.to(bench.device), sizes.batch, sizes.block, context)
            if bench.compiled:
                model.compile()
            return step

        recipes = sorted(path.stem for path in RECIPES.glob("*.yaml"))
        found = compare(bench, {recipe: partial(make, recipe) for recipe in recipes}, BASELINE)
        rows += [{"precision": precision, "model": recipe, **row} for recipe, row in found.items()]
    note = (
        f"Forward, backward, clipping and AdamW, {'compiled' if bench.compiled else 'not compiled'}; "
        f"{sizes.batch} sequences of {sizes.block} tokens, models of {sizes.recipes.name}/*.yaml"
        f"{''.join(f', {k} = {v}' for k, v in sizes.model.items())}. "
        "Memory is what a step takes on top of weights and the optimiser's state."
    )
    return Section("Training steps", note, rows)


def error_section(bench: Bench) -> Section:
    """Outputs in half and single precision against float64 on the CPU."""
    sizes, rows = bench.sizes, []
    for key in LAYERS:
        layer = variant(key).build(Shape(sizes.dim, sizes.heads, sizes.error_length))
        for dtype in DTYPES:
            rounded = copy.deepcopy(layer).to(dtype)
            x = bench.tokens(sizes.error_length, sizes.dim).to(dtype)
            with torch.no_grad():
                exact = copy.deepcopy(rounded).double()(x.cpu().double())
                error = rounded.to(bench.device)(x).cpu().double() - exact
            rows.append(
                {
                    "layer": variant(key).label,
                    "dtype": _name(dtype),
                    "largest error": (error.abs().max() / exact.abs().max()).item(),
                    "root mean square": (error.square().mean() / exact.square().mean()).sqrt().item(),
                }
            )
    note = (
        f"Output of one sequence of {sizes.error_length} tokens, relative to the largest and to the "
        "root mean square output. The reference has the same rounded weights and input."
    )
    return Section("Errors against float64", note, rows)


def certificate_section(bench: Bench) -> Section:
    """A certificate beside what an attack reaches, both computed on the device in float32."""
    sizes, n = bench.sizes, bench.sizes.attack_length
    layer = lean(Shape(sizes.dim, sizes.heads, n), positions="alibi").to(bench.device)
    bound = lf.certify(layer).bound
    attack = lf.attack_lipschitz(
        OutputOnly(layer),
        bench.tokens(n, sizes.dim),
        steps=sizes.attack_steps,
        restarts=sizes.attack_restarts,
        generator=torch.Generator(bench.device).manual_seed(0),
    )
    row = {"layer": "L2, lean, ALiBi", "certificate": bound, "an attack reaches": attack.value}
    row["holds"] = "yes" if attack.value <= bound else Failure("NO, please report")
    note = (
        f"l2 norm, {n} tokens, D = {sizes.dim}, {sizes.attack_steps} steps from "
        f"{sizes.attack_restarts} starts."
    )
    return Section("Certificate against attack", note, [row])


PARTS: list[Callable[[Bench], Section]] = [device_section, kernel_section, layer_section]
PARTS += [training_section, error_section, certificate_section]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    given = parser(__doc__)
    given.add_argument("--device", default="cuda", help="any torch device, cpu to try it")
    given.add_argument("--output", default="report/bench", help="directory")
    given.add_argument("--seconds", type=float, default=10.0, help="for each group of timings")
    given.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it runs")
    given.add_argument("--compile", action="store_true", help="compile the models, as recipes/ptb do")
    return given.parse_args(argv)


def run(options: argparse.Namespace) -> bool:
    """Measures, prints and saves part by part; whether nothing failed."""
    directory = usable_directory(options.output, "--output")
    bench = Bench(
        device_of(options.device),
        SMOKE if options.smoke else FULL,
        0.0 if options.smoke else options.seconds,
        options.compile,
    )
    torch.manual_seed(0)
    sections: list[Section] = []
    for part in PARTS:
        try:
            section = part(bench)
        except Exception:
            rows = [{"failed": Failure(traceback.format_exc())}]
            section = Section(part.__name__, "This part failed; please report it.", rows)
        sections.append(section)
        show(section.rows, section.title)
        print(section.note)
        write_text(directory / "gpu.json", json.dumps([asdict(s) for s in sections], indent=2) + "\n")
        parts = [f"## {s.title}\n\n{s.note}\n\n{markdown(s.rows)}\n" for s in sections]
        write_text(directory / "gpu.md", "\n".join(["# recipes.bench.gpu\n", *parts]))
    print(f"written to {directory}/gpu.json and gpu.md")
    return not any(section.failed() for section in sections)


def main(argv: list[str] | None = None) -> int:
    complete: list[bool] = []
    code = exit_code(lambda: complete.append(run(arguments(argv))))
    return code or int(not all(complete))


if __name__ == "__main__":
    sys.exit(main())
