"""Host reads, kernels and operations of one training step of each language model, on the pretend GPU.

    python -m tests.gpu.steps                   5 layers of width 512, in a table
    python -m tests.gpu.steps --where           and where the host reads, and the kernels by name
    python -m tests.gpu.steps --layers 1 --dim 64 --precision bf16-mixed

Kernels do not depend on the batch, and here not on the number of tokens either.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter

import torch
import torch.nn.functional as F

import lipformer as lf
from tests.gpu import pretend

VOCABULARY, BATCH, TOKENS = 50, 2, 32
DTYPES = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def training_step(
    variant: str, *, layers: int = 5, dim: int = 512, precision: str = "32-true", **options: object
) -> pretend.Log:
    """What forward and backward of a second training step do, inside :func:`pretend.device`."""
    torch.manual_seed(0)
    model = lf.models.VARIANTS[variant](
        VOCABULARY, dim=dim, num_heads=8, num_layers=layers, max_len=TOKENS, **options
    ).to(pretend.NAME)
    dtype = DTYPES[precision]
    for _ in range(2):
        text = torch.randint(VOCABULARY, (BATCH, TOKENS + 1)).to(pretend.NAME)
        cast = torch.autocast(pretend.NAME, dtype) if dtype else contextlib.nullcontext()
        model.zero_grad()
        with pretend.record() as log:
            with cast:
                logits = model(text[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
    return log


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
    parser.add_argument("--precision", choices=DTYPES, default="32-true")
    parser.add_argument("--variants", nargs="+", default=[*lf.models.VARIANTS, "contractive_kim2021"])
    parser.add_argument("--where", action="store_true")
    given = parser.parse_args()
    print(f"{given.layers} layers, D = {given.dim}, {BATCH} x {TOKENS} tokens, {given.precision}")
    columns = ("host reads", "kernels", "per layer", "GFLOP", "float64", "share")
    print(f"{'variant':22s} {columns[0]} {columns[1]:>8s} {columns[2]:>10s}", end="")
    print(f" {columns[3]:>8s} {columns[4]:>8s} {columns[5]:>8s}")
    with pretend.device():
        for name in given.variants:
            variant, _, bound = name.partition("_kim")
            options = {"bound": f"kim{bound}"} if bound else {}
            try:
                log = training_step(
                    variant, layers=given.layers, dim=given.dim, precision=given.precision, **options
                )
            except pretend.DeviceMixing as error:
                print(f"{name:22s} fails: {error}")
                continue
            print(row(name, log, given.layers), flush=True)
            if given.where:
                for read, count in Counter(log.reads).most_common():
                    print(f"    {count:4d} x {read.kind:16s} {read.where}")
                print("    " + ", ".join(f"{n} {k}" for k, n in log.kernels.most_common(12)))


if __name__ == "__main__":
    main()
