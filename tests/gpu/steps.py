"""Host reads, kernels and operations of a training step of each model of recipes/ptb on the pretend GPU.

    python -m tests.gpu.steps                   5 layers of width 512, in a table
    python -m tests.gpu.steps --where           and where the host reads, and the kernels by name
    python -m tests.gpu.steps --layers 1 --dim 64 --precision 32-true
    python -m tests.gpu.steps --json            one line for each variant, for test_steps.py

Kernels do not depend on the batch, and here not on the number of tokens either. The JSON lines also say
how many of 14 steps in float16 a loss scale skips, in a small model.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor

from lipformer.models import LanguageModel
from recipes.bench.training import RECIPES, model_of
from tests.gpu import pretend

BATCH, TOKENS = 2, 32
# Of recipes/ptb/small, which has the variants and not ddp and fsdp.
VARIANTS = sorted(path.stem for path in RECIPES.glob("*.yaml"))
DTYPES = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def build(name: str, layers: int, dim: int) -> LanguageModel:
    """The model of recipes/ptb/NAME.yaml on the device, without dropout."""
    torch.manual_seed(0)
    recipe = RECIPES.parent / f"{name}.yaml"
    return model_of(recipe, TOKENS, dim=dim, num_layers=layers, dropout=0.0).to(pretend.NAME)


def draw(model: LanguageModel) -> Tensor:
    """Random text (B, N + 1)."""
    return torch.randint(model.config.vocab_size, (BATCH, TOKENS + 1)).to(pretend.NAME)


def loss_of(model: LanguageModel, text: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The loss of a training step."""
    with torch.autocast(pretend.NAME, dtype) if dtype else contextlib.nullcontext():
        return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def training_step(name: str, layers: int, dim: int, precision: str = "bf16-mixed") -> pretend.Log:
    """What forward and backward of a second training step do, inside :func:`pretend.device`."""
    model = build(name, layers, dim)
    with torch.no_grad():
        loss_of(model, draw(model), DTYPES[precision])
    text = draw(model)
    with pretend.record() as log:
        loss_of(model, text, DTYPES[precision]).backward()
    return log


def skipped_steps(name: str) -> int:
    """How many of 14 steps in float16 the loss scale skips, by infinite gradients."""
    model = build(name, layers=1, dim=32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(pretend.NAME)
    scales = [scaler.get_scale()]
    for _ in range(14):
        optimiser.zero_grad()
        scaler.scale(loss_of(model, draw(model), torch.float16)).backward()
        scaler.step(optimiser)
        scaler.update()
        scales.append(scaler.get_scale())
    return sum(after < before for before, after in itertools.pairwise(scales))


def row(name: str, log: pretend.Log, layers: int) -> str:
    """One line of the table."""
    kernels, flops = sum(log.kernels.values()), sum(log.flops.values())
    double = log.flops[torch.float64]
    return (
        f"{name:22s} {len(log.reads):10d} {kernels:8d} {kernels / layers:10.0f} {flops / 1e9:8.2f}"
        f" {double / 1e9:8.2f} {100 * double / max(flops, 1):7.1f}%"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--precision", choices=DTYPES, default="bf16-mixed")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--where", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not given.json:
        print(f"{given.layers} layers, D = {given.dim}, {BATCH} x {TOKENS} tokens, {given.precision}")
        print(f"{'variant':22s} host reads  kernels  per layer    GFLOP  float64    share")
    with pretend.device():
        for name in given.variants:
            log = training_step(name, given.layers, given.dim, given.precision)
            if given.json:
                kernels, reads = sum(log.kernels.values()), len(log.reads)
                found = {
                    "variant": name,
                    "kernels": kernels,
                    "reads": reads,
                    "skipped": skipped_steps(name),
                }
                print(json.dumps(found), flush=True)
                continue
            print(row(name, log, given.layers), flush=True)
            if given.where:
                for read, count in Counter(log.reads).most_common():
                    print(f"    {count:4d} x {read.kind:16s} {read.where}")
                print("    " + ", ".join(f"{n} {k}" for k, n in log.kernels.most_common(12)))


if __name__ == "__main__":
    main()
