"""A character Transformer that knows its Lipschitz constant while it learns.

    make train            (or: python -m recipes.demo --steps 300)

Trains a small causal Transformer of certified layers on text that ships with Python, on CPU in about a
minute. While it learns, it prints the certified constant of the map from embedded characters to logits
beside the largest gain an attack finds: the truth lies between the two. At the end it shows how the
gain of dot-product attention grows with its input while that of L2 attention does not, and leaves a
picture.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import lipformer as lf
from training.characters import Characters, embedded_text

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WIDTH, HEADS, DEPTH, LENGTH, BATCH = 64, 4, 3, 64, 16


def certified_transformer(width: int, heads: int, depth: int, symbols: int) -> nn.Sequential:
    """Contractive L2 attention (ALiBi, any length) and 1-Lipschitz feed-forward parts, then logits."""
    blocks: list[nn.Module] = []
    for _ in range(depth):
        attention = lf.L2MultiheadAttention(
            width,
            heads,
            batch_first=True,
            value_proj=False,
            causal=True,
            positions="alibi",
            proj_coeff=1.0,
        )
        blocks.append(lf.Residual(lf.Contractive(attention, coeff=1.0, norm="l2")))
        blocks.append(lf.Residual(lf.FeedForward(width, 4 * width, coeff=1.0)))
    return nn.Sequential(*blocks, nn.Linear(width, symbols))


def bits(body: nn.Module, embed: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Bits per character of the model's predictions."""
    logits = body(embed(inputs))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / math.log(2.0)


def largest_gain(body: nn.Module, x: Tensor) -> float:
    """The largest gain a short attack finds near real inputs (a lower estimate)."""
    return lf.attack_lipschitz(
        body, x, steps=8, restarts=2, generator=torch.Generator().manual_seed(0)
    ).value


def gains_by_scale(scales: tuple[float, ...]) -> dict[str, list[float]]:
    """Local gains of both attentions where one token is zero and the rest grow (Kim et al. 2021).

    The zero token sees all others alike, so the gain of dot-product attention is their variance.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 12, 16, generator=generator, dtype=torch.float64)
    x[:, 0] = 0.0
    torch.manual_seed(0)
    dot = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64).eval()
    l2 = lf.L2MultiheadAttention(16, 2, batch_first=True, value_proj=False, dtype=torch.float64)

    def gain(layer: nn.Module, at: Tensor) -> float:
        return lf.estimate_lipschitz(lambda y: layer(y, y, y, need_weights=False)[0], at).value

    return {
        "dot-product": [gain(dot, scale * x) for scale in scales],
        "L2": [gain(l2, scale * x) for scale in scales],
        "L2, certified": [lf.certify(l2, seq_len=12).bound] * len(scales),
    }


def train(steps: int, console: Console) -> list[tuple[int, float, float, float]]:
    """Trains the model; returns (step, bits per character, certified constant, attacked gain)."""
    torch.manual_seed(0)
    text = Characters.of(embedded_text())
    embed = nn.Embedding(len(text.symbols), WIDTH)
    body = certified_transformer(WIDTH, HEADS, DEPTH, len(text.symbols))
    weights = [*embed.parameters(), *body.parameters()]
    optimiser = torch.optim.AdamW(weights, lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    judged = text.judged(LENGTH, 32)
    batches = text.batches(LENGTH, BATCH, torch.Generator().manual_seed(0))
    history = []
    table = Table("step", "bits per character", "certified constant", "attack reaches", "seconds")
    begin = time.perf_counter()
    for step in range(steps + 1):
        if step % max(1, steps // 4) == 0:
            with torch.no_grad():
                loss = bits(body, embed, *judged).item()
            gain = largest_gain(body, embed(judged[0][:1]).detach())
            bound = lf.certify(body).bound
            history.append((step, loss, bound, gain))
            seconds = time.perf_counter() - begin
            table.add_row(str(step), f"{loss:.3f}", f"{bound:.2f}", f"{gain:.2f}", f"{seconds:.0f}")
            console.print(f"step {step}: {loss:.3f} bits per character, constant <= {bound:.2f}")
        optimiser.zero_grad()
        bits(body, embed, *next(batches)).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        if step < steps:
            schedule.step()
    console.print(table)
    console.print(str(lf.certify(body)))
    return history


def draw(
    history: list[tuple[int, float, float, float]],
    scales: tuple[float, ...],
    gains: dict[str, list[float]],
    path: Path,
) -> None:
    """Saves the three pictures side by side."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    step, loss, bound, gain = zip(*history, strict=True)
    left.semilogy(step, bound, "o-", label="certified constant")
    left.semilogy(step, gain, "s-", label="attack reaches")
    left.set(xlabel="step", ylabel="gain, l2 norm", title="From embedded characters to logits")
    left.legend()
    middle.plot(step, loss, "^-")
    middle.set(xlabel="step", ylabel="held-out bits per character", title="What it has learnt")
    for name, values in gains.items():
        right.loglog(scales, values, "--" if "certified" in name else "o-", label=name)
    right.set(xlabel="scale of the input", ylabel="local gain", title="One attention layer")
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Runs the demonstration."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="training steps (default 300)")
    parser.add_argument(
        "--out", type=Path, default=Path("report/demo.png"), help="where the picture goes"
    )
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    # Far keys of ALiBi give denormal weights, which slow CPUs down.
    torch.set_flush_denormal(True)
    console = Console()
    history = train(options.steps, console)
    scales = (1.0, 10.0, 100.0, 1000.0)
    gains = gains_by_scale(scales)
    table = Table("local gain", *(f"scale {scale:g}" for scale in scales))
    for name, values in gains.items():
        table.add_row(name, *(f"{value:.3g}" for value in values))
    console.print(table)
    draw(history, scales, gains, options.out)
    console.print(f"picture: {options.out}")


if __name__ == "__main__":
    main()
