"""How far can the output of attention move? LoFAST's bounds beside what an attack reaches.

    python -m recipes.analysis.lofast --out report/analysis/lofast

Draws attention layers at random, with torch's initial weights and normal tokens ("generic") and with
weights and tokens of norm one, and moves their tokens by up to eps. Writes lofast.csv and lofast.png:
the largest movement of the output, divided by eps, as the plain and the refined bound allow and as
projected gradient ascent finds it (the truth lies between the refined bound and the attack), over eps
and through several generic layers with residuals x + f(x) and x/2 + f(x)/2. Expect the refined
bound at the attack for small eps and within a few percent of it for weights and tokens of norm one up to
eps = 1; for generic layers it is 10 times below the plain one at eps = 0.01 and 2.5 times from 1 on.
Through plain residuals bounds grow with depth out of all proportion; through convex ones the refined
bound falls. Takes half a minute on one core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from jsonargparse.typing import PositiveFloat, PositiveInt
from rich.progress import track
from torch import Tensor, nn

from lipformer.analysis import AttentionMaps, attention_maps, lofast_bound
from recipes.figures import Panel, draw
from recipes.output import exit_code, parser, show, usable_directory, write_csv

RADII = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
KINDS = ("generic", "unit-norm")
RESIDUALS = {"x + f(x)": (1.0, 1.0), "x/2 + f(x)/2": (0.5, 0.5)}
LINES, MOVED = {name: name for name in ("plain", "refined", "attack")}, "movement / eps"
PANELS = [Panel("eps", LINES, "", {"kind": k}, "xy", "eps, x + f(x)", MOVED, k) for k in KINDS]
PANELS += [
    Panel("depth", LINES, "", {"kind": k}, "y", "generic layers", f"{MOVED} at last", k)
    for k in RESIDUALS
]
Row = dict[str, str | int | float]


def attack(
    function: Callable[[Tensor], Tensor], x: Tensor, eps: Tensor, *, steps: int = 40, starts: int = 1
) -> Tensor:
    """The largest ||function(x') - function(x)|| that projected gradient ascent finds, (B,).

    Args:
        function: of tokens or images, sample by sample.
        x: (B, *).
        eps: radii, (B,).
        steps: of ascent from each start.
        starts: random points on the sphere of radius eps.
    """
    shape = (-1, *[1] * (x.ndim - 1))

    def norm(y: Tensor) -> Tensor:
        return torch.linalg.vector_norm(y.flatten(1), dim=1)

    base = function(x).detach()
    best = torch.zeros_like(eps)
    for _ in range(starts):
        e = torch.randn_like(x)
        e = e * (eps / norm(e)).view(shape)
        for step in range(steps + 1):
            e.requires_grad_()
            moved = norm(function(x + e) - base)
            best = torch.maximum(best, moved.detach())
            (slope,) = torch.autograd.grad(moved.sum(), e)
            length = eps * (1.0 if 2 * step < steps else 0.3) / norm(slope).clamp_min(1e-300)
            e = e.detach() + slope * length.view(shape)
            e = e * (eps / norm(e).clamp_min(1e-300)).clamp_max(1.0).view(shape)
    return best


def random_maps(kind: str, dim: int, heads: int) -> AttentionMaps:
    """A random layer: torch's initial weights ("generic"), or divided by their norms ("unit-norm")."""
    layer = nn.MultiheadAttention(dim, heads, batch_first=True, dtype=torch.float64)
    layer.requires_grad_(False)
    if kind == "unit-norm":
        for part in (*layer.in_proj_weight.chunk(3), layer.out_proj.weight):
            part.normal_()
            part.div_(torch.linalg.matrix_norm(part, 2))
    return attention_maps(layer)


def random_tokens(kind: str, batch: int, tokens: int, dim: int) -> Tensor:
    """Normal tokens, of norm one for unit-norm layers."""
    x = torch.randn(batch, tokens, dim, dtype=torch.float64)
    return nn.functional.normalize(x, dim=-1) if kind == "unit-norm" else x


def through(layers: list[AttentionMaps], residual: float, scale: float) -> Callable[[Tensor], Tensor]:
    """The network of layers r x + s f(x)."""

    def network(x: Tensor) -> Tensor:
        for maps in layers:
            x = residual * x + scale * maps(x)
        return x

    return network


def movement(
    layers: list[AttentionMaps], x: Tensor, eps: float, residual: float, scale: float, steps: int
) -> dict[str, float]:
    """Medians over samples of movement / eps: by the attack and as both bounds allow.

    And the largest share of the refined bound that the attack reaches for any of them.
    """
    network = through(layers, residual, scale)
    radius = torch.full(x.shape[:1], eps, dtype=x.dtype)
    found = {"attack": attack(network, x, radius, steps=steps)}
    for name in ("refined", "plain"):
        y, delta = x, radius
        for maps in layers:
            delta = lofast_bound(
                maps, y, delta, residual=residual, scale=scale, refined=name == "refined"
            )
            y = residual * y + scale * maps(y)
        found[name] = delta
    medians = {name: float((value / eps).median()) for name, value in found.items()}
    return {**medians, "share": float((found["attack"] / found["refined"]).max())}


def measure(options: argparse.Namespace) -> list[Row]:
    """All rows of the table."""
    n, d, h, b = options.tokens, options.dim, options.heads, options.samples
    jobs: list[tuple[str, str, str, int, float]] = [
        ("eps", kind, "x + f(x)", 1, eps) for kind in KINDS for eps in RADII
    ]
    jobs += [
        ("depth", name, name, depth, options.eps)
        for name in RESIDUALS
        for depth in range(1, options.depth + 1)
    ]
    rows: list[Row] = []
    for experiment, kind, name, depth, eps in track(jobs, "attacks and bounds", transient=True):
        weights = kind if kind in KINDS else "generic"
        torch.manual_seed(options.seed)
        layers = [random_maps(weights, d, h) for _ in range(depth)]
        x = random_tokens(weights, b, n, d)
        found = movement(layers, x, eps, *RESIDUALS[name], options.steps)
        rows.append({"experiment": experiment, "kind": kind, "depth": depth, "eps": eps, **found})
    return rows


def run(options: argparse.Namespace) -> None:
    """Measures and writes."""
    usable_directory(options.out)
    rows = measure(options)
    write_csv(options.out / "lofast.csv", rows)
    draw(PANELS, rows, options.out / "lofast.png")
    show(rows, f"movement / eps, medians of {options.samples} inputs")
    print(f"written to {options.out}")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    given = parser(__doc__)
    given.add_argument("--out", type=Path, default=Path("report/analysis/lofast"), help="directory")
    for name, default, text in (
        ("tokens", 16, "N"),
        ("dim", 16, "D"),
        ("heads", 4, "a divisor of dim"),
        ("samples", 8, "random inputs of each layer"),
        ("steps", 40, "of the attack"),
        ("depth", 5, "the largest number of layers"),
    ):
        given.add_argument(f"--{name}", type=PositiveInt, default=default, help=text)
    given.add_argument("--eps", type=PositiveFloat, default=0.1, help="radius through depth")
    given.add_argument("--seed", type=int, default=0, help="of all random numbers")
    options = given.parse_args(arguments)
    return exit_code(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
