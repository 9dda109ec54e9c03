"""Host reads, kernels and operations of a training step of each model of recipes/ptb on the pretend GPU.

    python -m tests.gpu.steps           5 layers of width 512 in bf16-mixed, a JSON line for each variant
    python -m tests.gpu.steps --where   and where the host reads, and the kernels by name

Kernels do not depend on the batch, and here not on the number of tokens either. The lines also say how
many of 14 steps in float16 a loss scale skips, in a small model.
"""

from __future__ import annotations

import itertools
import json
import sys
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


def build(name: str, layers: int, dim: int) -> LanguageModel:
    """The model of recipes/ptb/NAME.yaml on the device, without dropout."""
    torch.manual_seed(0)
    recipe = RECIPES.parent / f"{name}.yaml"
    return model_of(recipe, TOKENS, dim=dim, num_layers=layers, dropout=0.0).to(pretend.NAME)


def draw(model: LanguageModel) -> Tensor:
    """Random text (B, N + 1)."""
    return torch.randint(model.config.vocab_size, (BATCH, TOKENS + 1)).to(pretend.NAME)


def loss_of(model: LanguageModel, text: Tensor, dtype: torch.dtype) -> Tensor:
    """The loss of a training step."""
    with torch.autocast(pretend.NAME, dtype):
        return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def training_step(name: str) -> pretend.Log:
    """What forward and backward of a second training step do, inside :func:`pretend.device`."""
    model = build(name, layers=5, dim=512)
    with torch.no_grad():
        loss_of(model, draw(model), torch.bfloat16)
    text = draw(model)
    with pretend.record() as log:
        loss_of(model, text, torch.bfloat16).backward()
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


def main(where: bool) -> None:
    """Prints a line for each variant."""
    with pretend.device():
        for name in VARIANTS:
            log = training_step(name)
            found = {"variant": name, "kernels": sum(log.kernels.values()), "reads": len(log.reads)}
            found |= {f"GFLOP of {dtype}": round(n / 1e9, 2) for dtype, n in log.flops.items()}
            print(json.dumps({**found, "skipped": skipped_steps(name)}), flush=True)
            if where:
                for read, count in Counter(log.reads).most_common():
                    print(f"    {count:4d} x {read.kind:16s} {read.where}")
                print("    " + ", ".join(f"{n} {k}" for k, n in log.kernels.most_common(12)))


if __name__ == "__main__":
    main("--where" in sys.argv)
