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
import math
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lipformer as lf
from recipes.bench.attention import environment
from recipes.bench.device import Counts, counts, device_facts, device_of, peak_memory, waiting_clock
from recipes.bench.peers import OutputOnly, Shape, lean, variant
from recipes.bench.sdpa import BACKENDS, attempt, call_of
from recipes.bench.sections import Failure, Section, save, show
from recipes.bench.timing import Ratio, Samples, interleave
from recipes.bench.timing import training_step as layer_step
from recipes.bench.training import BASELINE, RECIPES, model_of
from recipes.bench.training import training_step as model_step
from recipes.output import exit_code, usable_directory
from training.errors import BadInput, first_line

HEAD_WIDTHS = (32, 64, 128)
DTYPES = (torch.bfloat16, torch.float32)
LAYERS = ("mha", "sdpa", "lean", "paper", "lean_alibi")
_MEGABYTE = 2**20

Step = Callable[[Callable[[], float]], float]
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How large all is. ``model`` changes what the recipes say."""

    tokens: int
    lengths: tuple[int, ...]
    dim: int
    heads: int
    error_length: int
    attack_length: int
    attack_steps: int
    attack_restarts: int
    recipes: Path
    model: dict[str, Any]
    batch: int
    block: int
    repetitions: int


FULL = Sizes(
    tokens=16384,
    lengths=(256, 1024, 4096, 16384),
    dim=512,
    heads=8,
    error_length=1024,
    attack_length=64,
    attack_steps=60,
    attack_restarts=16,
    recipes=RECIPES.parent,
    model={},
    batch=64,
    block=288,
    repetitions=3,
)
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
        return torch.randn(batch, length, dim, generator=torch.Generator().manual_seed(0)).to(
            self.device
        )

    def time(self, steps: dict[str, Step]) -> Samples:
        return interleave(
            steps,
            seconds=self.seconds,
            min_repetitions=self.sizes.repetitions,
            clock=waiting_clock(self.device),
        )


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
                row: Row = {"layer": variant(key).label, "dtype": _name(dtype), "d": width}
                chosen = attempt(call)
                trials = {name: attempt(call, name) for name in BACKENDS}
                for name, trial in {"chosen": chosen, **trials}.items():
                    if trial.reason:
                        reasons.setdefault(f"{name}: {trial.reason}", []).append(call.query.shape[-1])
                row |= {
                    "width in the kernel": call.query.shape[-1],
                    "chosen": f"{chosen.kernel}, {chosen}",
                    **{name: str(trial) for name, trial in trials.items()},
                }
                rows.append(row)
    notes = [f"Causal, {n} tokens: torch's choice, and each backend when it is the only one allowed."]
    notes += [f"- {why} (widths {sorted(set(widths))})" for why, widths in reasons.items()]
    return Section("Kernels of scaled_dot_product_attention", "\n".join(notes), rows)


def compare(bench: Bench, build: dict[str, Callable[[], Step]], baseline: str) -> dict[str, Row]:
    """Time, memory, host reads and kernels of steps, beside those of one of them.

    A step that fails has the reason in its first cell, and the others go on.
    """
    steps: dict[str, Step] = {}
    failures: dict[str, str] = {}
    peaks: dict[str, int | None] = {}
    counted: dict[str, Counts] = {baseline: Counts(None, None)}
    for name, make in build.items():
        try:
            step = make()
            step(time.perf_counter)  # the first run makes what later ones keep
            peaks[name] = peak_memory(bench.device, partial(step, time.perf_counter))
            counted[name] = counts(bench.device, partial(step, time.perf_counter))
            steps[name] = step
        except torch.OutOfMemoryError:
            failures[name] = "out of memory"
        except RuntimeError as error:
            failures[name] = Failure(f"failed: {first_line(error)}")
    samples = bench.time(steps)
    rows: dict[str, Row] = {}
    for name in build:
        ratio = samples.ratio(name, baseline)
        kernels, usual = (counted.get(n, counted[baseline]).kernels for n in (name, baseline))
        seconds = samples.median(name) if name in steps else math.nan
        peak = peaks.get(name)
        row: Row = {
            "ms": seconds * 1e3,
            "steps/s": 1.0 / seconds,
            f"time, × {baseline}": None if ratio is None else ratio.median,
            "quartiles": None if ratio is None else _quartiles(ratio),
            "peak MB": None if peak is None else peak / _MEGABYTE,
            "host reads": counted.get(name, counted[baseline]).host_reads,
            "kernels": kernels,
            f"kernels, × {baseline}": None if kernels is None or usual is None else kernels / usual,
        }
        if name in failures:
            row = {**dict.fromkeys(row, "-"), "ms": failures[name]}
        rows[name] = row
    return rows


def _quartiles(ratio: Ratio) -> str:
    return "one run only" if ratio.count == 1 else f"{ratio.low:.3f} to {ratio.high:.3f}"


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


PARTS: tuple[Callable[[Bench], Section], ...] = (
    device_section,
    kernel_section,
    layer_section,
    training_section,
    error_section,
    certificate_section,
)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", help="any torch device, cpu to try it (default: cuda)")
    parser.add_argument("--output", default="report/bench", help="directory (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each group of timings")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--compile", action="store_true", help="compile the models, as recipes/ptb do")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> bool:
    """Measures, prints and saves part by part; whether nothing failed."""
    if options.seconds < 0:
        raise BadInput(f"--seconds must not be negative, got {options.seconds}")
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
        show(section)
        paths = save(sections, directory, "gpu", "recipes.bench.gpu")
    print("written to " + " and ".join(map(str, paths)))
    return not any(section.failed() for section in sections)


def main(argv: list[str] | None = None) -> int:
    complete: list[bool] = []
    code = exit_code(lambda: complete.append(run(arguments(argv))))
    return code or int(not all(complete))


if __name__ == "__main__":
    sys.exit(main())
