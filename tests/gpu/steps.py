"""Host reads and kernels on the pretend GPU: training steps of recipes/ptb, and samples of flows.

    python -m tests.gpu.steps           5 layers of width 512 in bf16-mixed, a JSON line for each variant
    python -m tests.gpu.steps --where   and where the host reads, and the kernels by name
    python -m tests.gpu.steps --flows   samples of flows alone, fresh and trained for 40 steps

Kernels do not depend on the batch, and here not on the number of tokens either. The lines of training
also say how many of 14 steps in float16 a loss scale skips, in a small model; those of samples, how
often branches were evaluated, and in how many milliseconds of one CPU thread.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipformer.flows import AttentionFlow
from lipformer.models import LanguageModel
from recipes.bench.training import RECIPES, model_of
from tests.gpu import pretend

BATCH, TOKENS = 2, 32
# Of recipes/ptb/small, which has the variants and not ddp and fsdp.
VARIANTS = sorted(path.stem for path in RECIPES.glob("*.yaml"))
# Depth, tokens, samples and mode of flows of 2 features, width 16 and hidden 32.
FLOWS: dict[str, tuple[int, int, int, str]] = {
    "small": (2, 12, 5, "norm"),
    "sets": (4, 12, 64, "norm"),
    "sequences": (4, 32, 64, "causal"),
}


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


def trained_flow(name: str, steps: int) -> AttentionFlow:
    """A flow on the CPU, fitted to points that share where they lie, skewed along their sequence."""
    torch.manual_seed(0)
    depth, tokens, _, mode = FLOWS[name]
    options = {"depth": depth, "num_heads": 2, "width": 16, "hidden": 32, "mode": mode}
    flow = AttentionFlow(2, seq_len=tokens, log_det=None if mode == "causal" else "exact", **options)
    moves = torch.randn(64, tokens, 2).exp() - 1.0
    x = torch.randn(64, 1, 2) + 0.2 * moves + 0.1 * moves.cumsum(1) / tokens**0.5
    flow.initialize(x)
    optimiser = torch.optim.Adam(flow.parameters(), lr=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        (-flow.log_prob(x).mean()).backward()
        optimiser.step()
    return flow.eval()


def sampled(name: str, steps: int) -> dict[str, Any]:
    """What Flow.sample takes, after so many training steps, inside :func:`pretend.device`."""
    flow, (_, tokens, samples, _) = trained_flow(name, steps), FLOWS[name]
    times = []
    for _ in range(3):
        start = time.process_time()
        flow.sample(samples, tokens, generator=torch.Generator().manual_seed(1))
        times.append(1000.0 * (time.process_time() - start))
    evaluations = sum(record.iterations for record in flow.record if record is not None)
    found = {"flow": name, "steps": steps, "evaluations": evaluations, "ms": round(min(times), 1)}
    flow.to(pretend.NAME)
    torch.manual_seed(1)
    with pretend.record() as log:
        flow.sample(samples, tokens)
    return {**found, "kernels": sum(log.kernels.values()), "reads": len(log.reads)}


def main(where: bool, flows: bool) -> None:
    """Prints a line for each variant and flow."""
    with pretend.device():
        for name, steps in itertools.product(FLOWS, (0, 40) if flows else (0,)):
            print(json.dumps(sampled(name, steps)), flush=True)
        for name in () if flows else VARIANTS:
            log = training_step(name)
            found = {"variant": name, "kernels": sum(log.kernels.values()), "reads": len(log.reads)}
            found |= {f"GFLOP of {dtype}": round(n / 1e9, 2) for dtype, n in log.flops.items()}
            print(json.dumps({**found, "skipped": skipped_steps(name)}), flush=True)
            if where:
                for read, count in Counter(log.reads).most_common():
                    print(f"    {count:4d} x {read.kind:16s} {read.where}")
                print("    " + ", ".join(f"{n} {k}" for k, n in log.kernels.most_common(12)))


if __name__ == "__main__":
    main("--where" in sys.argv, "--flows" in sys.argv)
