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
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jsonargparse.typing import PositiveFloat, PositiveInt
from rich.progress import track
from torch import Tensor, nn

import lipformer as lf
from lipformer.analysis import AttentionMaps, measure_gain, split_attack, split_gain
from recipes.figures import Panel, draw
from recipes.output import exit_code, parser, show, usable_directory, write_csv
from training.errors import BadInput

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
            for k in range(draws):
                attack = split_attack(layer, x[k], weights, step=step * radius)
                both = float(unsplit[k]), float(split[k])
                yield Row(kind, name, dim, n, radius, k, *both, attack.step, attack.ratio)


def select(rows: list[Row], **fixed: object) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(getattr(row, name) == value for name, value in fixed.items())]


def draw_picture(rows: list[Row], path: Path) -> None:
    """Gains over the radius for the fewest tokens, and what splitting adds over the number of tokens."""
    tokens, ratio = min(row.tokens for row in rows), "split / unsplit gain"
    lines, few = {k: k for k in ("unsplit", "split", "attack")}, {"cloud": "centred", "tokens": tokens}
    panels = [Panel("radius", lines, "attention", few, "y", "radius", "W2 gain", f"{tokens} tokens")]
    for kind in CLOUDS:
        some = {"cloud": kind, "attention": "dot-product"}
        panels += [Panel("tokens", "added", "radius", some, "", f"tokens, {kind} clouds", ratio)]
    draw(panels, [row._asdict() | {"added": added(row)} for row in rows], path)


def added(row: Row) -> float:
    """The factor that splitting adds to a cloud's gain."""
    return row.split / row.unsplit


def table(rows: list[Row]) -> list[dict[str, Any]]:
    """For each kind of cloud, attention and number of tokens, the cloud where splitting adds most."""
    found = []
    for key in dict.fromkeys((row.cloud, row.attention, row.tokens) for row in rows):
        names = dict(zip(("cloud", "attention", "tokens"), key, strict=True))
        group = select(rows, **names)
        decides = sum(added(row) > 1 + 1e-9 for row in group)
        top = max(group, key=added)._asdict()
        where = {name: top[name] if decides else "" for name in ("radius", "unsplit", "split", "attack")}
        found.append({**names, "decides": f"{decides} of {len(group)}", **where})
    return found


def run(options: argparse.Namespace) -> None:
    """Measures and writes."""
    if any(n < 3 or n % 2 == 0 for n in options.tokens):
        raise BadInput(f"--tokens must be odd numbers >= 3, got {options.tokens}")
    usable_directory(options.out)
    total = 2 * len(CLOUDS) * len(options.tokens) * len(options.radii) * options.draws
    clouds = measure(
        options.dim, options.tokens, options.radii, options.draws, options.step, options.seed
    )
    rows = list(track(clouds, "clouds", total=total, transient=True))
    show(table(rows), "clouds where splitting decides; the radius where it adds most")
    known = torch.tensor([[2.0], [-2.0], [0.0]], dtype=torch.float64), torch.ones(3)
    layer = attentions(1)["dot-product"]
    unsplit, split = (float(gain(layer, *known)) for gain in (measure_gain, split_gain))
    print(f"tokens {{2, -2, 0}}: {unsplit:.3f} unsplit, {split:.3f} split")
    write_csv(options.out / "mass_splitting.csv", [row._asdict() for row in rows])
    draw_picture(rows, options.out / "mass_splitting.png")
    print(f"written: {options.out}/mass_splitting.csv and .png")


def main(arguments: list[str] | None = None) -> int:
    """Runs the recipe; returns the exit code."""
    given = parser(__doc__)
    add = given.add_argument
    add("--tokens", type=int, nargs="+", default=[3, 5, 9, 25], help="odd numbers of tokens")
    radii = [0.5, 1.0, 2.0, 4.0, 8.0]
    add("--radii", type=PositiveFloat, nargs="+", default=radii, help="radii of the ball")
    add("--dim", type=PositiveInt, default=2, help="width of the tokens")
    add("--draws", type=PositiveInt, default=6, help="clouds of each kind and size")
    add("--step", type=PositiveFloat, default=1e-3, help="of the split, over the radius")
    add("--seed", type=int, default=0, help="of the clouds")
    add("--out", type=Path, default=Path("report/mass_splitting"), help="directory")
    options = given.parse_args(arguments)
    return exit_code(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
