"""Two pictures of docs/flows.md: a density for each context, and continuations of sequences.

    python -m recipes.flows.examples --out docs/pictures

Under a minute of one core. Everything is seeded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from lipformer.flows import AttentionFlow
from recipes.cli import run_recipe
from recipes.output import parser, usable_directory

CONTEXTS = (-1.0, 0.0, 1.0)
PAST, STEPS = 12, 8
# Quantiles between which the fans are filled, the widest first.
BANDS = ((0.05, 0.95), (0.25, 0.75))


def around(c: Tensor, generator: Generator) -> Tensor:
    """Sets of 3 points (B, 3, 2), around a place that depends on c (B, 1), the wider the larger c."""
    place = torch.cat([1.5 * c, 1.0 - 2.0 * c.square()], 1).unsqueeze(1)
    width = (0.5 * c).exp().unsqueeze(1)
    return place + 0.3 * width * torch.randn(len(c), 3, 2, generator=generator)


def levels(count: int, generator: Generator) -> Tensor:
    """Sequences (B, PAST + STEPS, 1) of noise about a level of their own, which the past tells."""
    level = 1.5 * torch.randn(count, 1, 1, generator=generator)
    return level + 0.3 * torch.randn(count, PAST + STEPS, 1, generator=generator)


def fit(loss: Callable[[], Tensor], flow: AttentionFlow, updates: int, lr: float) -> None:
    """Adam with a cosine fall of the learning rate."""
    optimiser = torch.optim.Adam(flow.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, updates)
    for _ in range(updates):
        value = loss()
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        schedule.step()
    flow.eval()


def draw_contexts(path: Path, updates: int) -> None:
    """Learns p(x | c) and draws samples of it for three contexts, beside data."""
    from matplotlib.figure import Figure

    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"seq_len": 3, "context_dim": 1, "log_det": "exact"}
    flow = AttentionFlow(2, depth=1, num_heads=1, hidden=16, **options)

    def loss() -> Tensor:
        c = 2.0 * torch.rand(128, 1, generator=generator) - 1.0
        return -flow.log_prob(around(c, generator), context=c).mean()

    fit(loss, flow, updates, 1e-2)
    figure = Figure(figsize=(9.0, 3.2), layout="constrained")
    for axes, c in zip(figure.subplots(1, 3), CONTEXTS, strict=True):
        data = around(torch.full((100, 1), c), generator).flatten(0, 1)
        drawn = flow.sample(100, context=torch.tensor([c]), generator=generator).flatten(0, 1)
        axes.plot(*data.T, "x", color="0.65", markersize=4, label="data")
        axes.plot(*drawn.T, "o", color="black", markersize=2, label="samples")
        axes.set(xlim=(-3.5, 3.5), ylim=(-3.5, 3.5), title=f"c = {c:g}", xlabel="first coordinate")
    figure.axes[0].legend(fontsize="small", loc="upper right")
    figure.axes[0].set_ylabel("second coordinate")
    figure.savefig(path, dpi=100)


def draw_continuations(path: Path, updates: int) -> None:
    """Learns sequences and draws the quantiles of what follows three prefixes, and what did follow."""
    from matplotlib.figure import Figure

    generator = torch.Generator().manual_seed(0)
    flow = AttentionFlow(1, depth=2, num_heads=2, width=16, hidden=16, mode="causal")
    fit(lambda: -flow.log_prob(levels(64, generator)).mean(), flow, updates, 1e-2)
    x = levels(3, generator)
    future = flow.continue_(x[:, :PAST], STEPS, num_samples=500, generator=generator)[..., 0]
    figure = Figure(figsize=(9.0, 2.8), layout="constrained")
    time = range(PAST, PAST + STEPS)
    for axes, truth, draws in zip(
        figure.subplots(1, 3, sharey=True), x[..., 0], future.unbind(1), strict=True
    ):
        for grey, (low, high) in zip(("0.85", "0.6"), BANDS, strict=True):
            edges = draws.quantile(torch.tensor([low, high]), dim=0).tolist()
            axes.fill_between(time, *edges, color=grey, label=f"{low:.0%} to {high:.0%}")
        axes.plot(time, draws.median(0).values, "--", color="black", label="median")
        axes.plot(truth, ".-", color="black", linewidth=0.8, markersize=4, label="data")
        axes.axvline(PAST - 0.5, color="black", linewidth=0.5)
        axes.set(xlabel="token")
    figure.axes[0].set_ylabel("value")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=100)


def run(arguments: list[str]) -> None:
    """Draws both pictures."""
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=Path("report/flows/examples"), help="directory")
    options.add_argument("--updates", type=int, nargs=2, default=[200, 800], help="of both flows")
    given = options.parse_args(arguments)
    usable_directory(given.out)
    pictures = {"context": draw_contexts, "continuation": draw_continuations}
    for (name, draw), updates in zip(pictures.items(), given.updates, strict=True):
        torch.manual_seed(0)
        draw(given.out / f"{name}.png", updates)
        print(f"written to {given.out / name}.png")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return run_recipe("recipes.flows.examples", run, arguments)


if __name__ == "__main__":
    sys.exit(main())
