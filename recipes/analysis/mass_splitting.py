"""What splitting mass adds to the Wasserstein gain of attention on measures.

    python -m recipes.analysis.mass_splitting --out report/mass_splitting

Attention acts on weighted clouds of tokens. In the distance W2 a token's mass may also split and move
apart, which moving tokens as a whole cannot do: it raises the local gain from ||D^(1/2) J D^(-1/2)|| to
its maximum with ||G_i||, the derivative in one query (lipformer.analysis.split_gain). For every radius
and number of tokens this draws two kinds of clouds, random ones in a ball and centred ones (a token at
zero, pairs of opposite ones on the sphere), computes both gains, and splits a token in two by a finite
step to see what W2 does.

Expect, in ten seconds: splitting decides nothing in random clouds and nothing for L2 attention, whose
gain stays small; for dot-product attention (logits -<x, y>) it decides in centred clouds of radius 2 and
more, most where tokens are few (by 11% for three tokens), since the token at zero moved as a whole takes
part of its own image back. There the attack reaches the split gain. Tokens {2, -2, 0} give 2.398 unsplit
and 2.667 split. Leaves mass_splitting.csv (a row for each cloud) and mass_splitting.png.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import lipformer as lf
from lipformer.analysis import AttentionMaps, measure_gain, split_attack, split_gain
from lipformer.models._pretrained import atomic_write
from recipes.analysis.help import Help, claim_directory, positive

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Attention = AttentionMaps | nn.Module


class Row(NamedTuple):
    """One cloud: both gains, and the ratio of W2 distances that a split by a finite step reached."""

    cloud: str
    attention: str
    dim: int
    tokens: int
    radius: float
    draw: int
    unsplit: float
    split: float
    step: float
    attack: float


def attentions(dim: int) -> dict[str, Attention]:
    """Dot-product attention with A = -I, W = I and lean L2 attention with the same values."""
    eye = torch.eye(dim, dtype=torch.float64)
    l2 = lf.L2MultiheadAttention(dim, 1, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        l2.q_proj.weight.copy_(eye)
        l2.out_proj.weight.copy_(eye)
        if l2.log_temperature is not None:
            l2.log_temperature.zero_()
    return {"dot-product": AttentionMaps(-eye[None], eye[None]), "L2": l2}


def random_cloud(n: int, dim: int, generator: torch.Generator) -> Tensor:
    """n tokens (n, dim), uniform in the unit ball."""
    length = torch.rand(n, 1, generator=generator, dtype=torch.float64) ** (1 / dim)
    return length * directions(n, dim, generator)


def centred_cloud(n: int, dim: int, generator: torch.Generator) -> Tensor:
    """A token at zero and opposite pairs on the unit sphere, (n, dim) for odd n."""
    u = directions((n - 1) // 2, dim, generator)
    return torch.cat([torch.zeros(1, dim, dtype=u.dtype), u, -u])


def directions(n: int, dim: int, generator: torch.Generator) -> Tensor:
    """Random unit vectors (n, dim)."""
    x = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    return x / x.norm(dim=-1, keepdim=True)


CLOUDS = {"random": random_cloud, "centred": centred_cloud}


def measure(
    dim: int, tokens: list[int], radii: list[float], draws: int, step: float, seed: int
) -> Iterator[Row]:
    """The rows of all clouds, of uniform weights; the same clouds up to scale at every radius."""
    layers = attentions(dim)
    for (kind, cloud), n, radius in product(CLOUDS.items(), tokens, radii):
        generator = torch.Generator().manual_seed(seed + n)
        x = radius * torch.stack([cloud(n, dim, generator) for _ in range(draws)])
        weights = torch.ones(n, dtype=torch.float64)
        for name, layer in layers.items():
            unsplit, split = measure_gain(layer, x, weights), split_gain(layer, x, weights)
            for draw in range(draws):
                attack = split_attack(layer, x[draw], weights, step=step * radius)
                both = float(unsplit[draw]), float(split[draw])
                yield Row(kind, name, dim, n, radius, draw, *both, attack.step, attack.ratio)


def median(rows: list[Row], column: str) -> float:
    """The median over clouds."""
    return float(torch.tensor([getattr(row, column) for row in rows], dtype=torch.float64).median())


def select(rows: list[Row], **fixed: object) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(getattr(row, name) == value for name, value in fixed.items())]


def draw_picture(rows: list[Row], path: Path) -> None:
    """Gains over the radius for the fewest tokens, and what splitting adds over the number of tokens."""
    tokens, radii = sorted({row.tokens for row in rows}), sorted({row.radius for row in rows})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    few = select(rows, cloud="centred", tokens=tokens[0])
    for color, name in (("C0", "dot-product"), ("C1", "L2")):
        for column, style in (("unsplit", "--"), ("split", "-"), ("attack", "x")):
            values = [median(select(few, attention=name, radius=radius), column) for radius in radii]
            left.loglog(radii, values, style, color=color, label=f"{name}, {column}")
    left.set(xlabel="radius", ylabel="W2 gain, median", title=f"Centred clouds of {tokens[0]} tokens")
    left.legend(fontsize=8)
    for (kind, style), radius in product((("centred", "o-"), ("random", "k:")), radii):
        ratios = []
        for n in tokens:
            group = select(rows, cloud=kind, attention="dot-product", tokens=n, radius=radius)
            ratios.append(max(added(row) for row in group))
        label = f"centred, radius {radius:g}" if kind == "centred" else None
        right.semilogx(tokens, ratios, style, label=label)
    right.plot([], [], "k:", label="random, every radius")
    right.set(xlabel="tokens", ylabel="split / unsplit gain, largest", title="Dot-product attention")
    right.legend(fontsize=8)
    with atomic_write(path) as part:
        figure.savefig(part, dpi=120)
    plt.close(figure)


def write_table(rows: list[Row], path: Path) -> None:
    """All rows as CSV."""
    with atomic_write(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows(rows)


def added(row: Row) -> float:
    """The factor that splitting adds to a cloud's gain."""
    return row.split / row.unsplit


def show(rows: list[Row], console: Console) -> None:
    """For each kind of cloud, attention and number of tokens, the cloud where splitting adds most."""
    # Narrow enough for 80 columns.
    names = ("cloud", "attention", "tokens", "decides", "radius", "unsplit", "split", "attack")
    table = Table(
        *names,
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        title="clouds where splitting decides; the radius where it adds most",
    )
    for key in dict.fromkeys((row.cloud, row.attention, row.tokens) for row in rows):
        group = select(rows, cloud=key[0], attention=key[1], tokens=key[2])
        decides = sum(added(row) > 1 + 1e-9 for row in group)
        top = max(group, key=added)
        cells = [f"{value:.3f}" for value in (top.unsplit, top.split, top.attack)]
        where = [f"{top.radius:g}", *cells] if decides else ["", "", "", ""]
        table.add_row(key[0], key[1], str(key[2]), f"{decides} of {len(group)}", *where)
    console.print(table)


def main(arguments: list[str] | None = None) -> None:
    """Runs the recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[3, 5, 9, 25], help="odd numbers of tokens"
    )
    parser.add_argument(
        "--radii", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0, 8.0], help="radii of the ball"
    )
    parser.add_argument("--dim", type=int, default=2, help="width of the tokens")
    parser.add_argument("--draws", type=int, default=6, help="clouds of each kind and size")
    parser.add_argument("--step", type=float, default=1e-3, help="of the split, over the radius")
    parser.add_argument("--seed", type=int, default=0, help="of the clouds")
    parser.add_argument("--out", type=Path, default=Path("report/mass_splitting"), help="directory")
    options = parser.parse_args(arguments)
    positive(parser, options, "radii", "dim", "draws", "step")
    if any(n < 3 or n % 2 == 0 for n in options.tokens):
        parser.error(f"--tokens must be odd numbers >= 3, got {options.tokens}")
    if max(options.tokens) * options.dim > 4096:
        parser.error(
            f"--tokens times --dim must be at most 4096, got {options.tokens} and {options.dim}"
        )
    claim_directory(parser, options.out)
    console = Console()
    rows: list[Row] = []
    total = 2 * len(CLOUDS) * len(options.tokens) * len(options.radii) * options.draws
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("clouds", total=total)
        for row in measure(
            options.dim, options.tokens, options.radii, options.draws, options.step, options.seed
        ):
            rows.append(row)
            progress.advance(task)
    show(rows, console)
    known = torch.tensor([[2.0], [-2.0], [0.0]], dtype=torch.float64), torch.ones(3)
    layer = attentions(1)["dot-product"]
    unsplit, split = (float(gain(layer, *known)) for gain in (measure_gain, split_gain))
    console.print(f"tokens {{2, -2, 0}}: {unsplit:.3f} unsplit, {split:.3f} split")
    write_table(rows, options.out / "mass_splitting.csv")
    draw_picture(rows, options.out / "mass_splitting.png")
    console.print(f"written: {options.out}/mass_splitting.csv and .png")


if __name__ == "__main__":
    main()
