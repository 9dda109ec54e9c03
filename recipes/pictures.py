"""Two pictures of docs/pictures.md: what a certificate is, and gains by the number of tokens.

    python -m recipes.pictures --out docs/pictures

Under a minute of one core. Everything is seeded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Generator, Tensor

import lipformer as lf
from recipes.cli import run_recipe
from recipes.output import parser, usable_directory

LENGTHS = tuple(2**k for k in range(2, 13))


def draw_certificate(path: Path, steps: int) -> None:
    """How far inputs and outputs of a layer move: random pairs, the steepest found, the certificate."""
    generator = Generator().manual_seed(0)
    layer = lf.L2MultiheadAttention(16, 2, batch_first=True, causal=False, max_len=16).double()

    def attend(x: Tensor) -> Tensor:
        return layer(x, need_weights=False)[0]

    bound = lf.certify(layer).bound
    start = torch.randn(1, 16, 16, dtype=torch.float64, generator=generator)
    found = lf.attack_lipschitz(attend, start, steps=steps, restarts=4, generator=generator).value
    x = 3.0 * torch.randn(400, 16, 16, dtype=torch.float64, generator=generator)
    step = torch.randn(400, 16, 16, dtype=torch.float64, generator=generator)
    step *= 10.0 ** (4.0 * torch.rand(400, 1, 1, dtype=torch.float64, generator=generator) - 3.5)
    with torch.no_grad():
        moved = (attend(x + step) - attend(x)).flatten(1).norm(dim=1)
    given = step.flatten(1).norm(dim=1)
    ends = torch.stack([given.min(), given.max()])

    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(ends, bound * ends, 1e4, color="0.85", label="no pair of inputs is here")
    axes.plot(ends, bound * ends, "-", color="black", label=f"certificate, {bound:.3g}")
    axes.plot(ends, found * ends, "--", color="black", label=f"steepest found by an attack, {found:.3g}")
    axes.plot(given, moved, "o", color="0.4", markersize=2, label="random pairs")
    axes.set(xscale="log", yscale="log", xlim=ends.tolist(), ylim=(moved.min().item() / 2, 1e4))
    axes.set(xlabel="distance of two inputs", ylabel="distance of their outputs")
    axes.legend(fontsize="small", loc="upper left")
    figure.savefig(path, dpi=100)


def draw_gain(path: Path, steps: int) -> None:
    """Bounds of the gain of one head in the l2 norm against the number of tokens."""
    gain = lf.functional.l2_gain
    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    axes = figure.subplots()
    options: dict[str, Any]
    for label, style, color, options in (
        ("Kim et al. 2021", ":", "black", {"theorem": "kim2021"}),
        ("causal", "--", "black", {"is_causal": True}),
        ("no mask", "-", "black", {}),
        ("ALiBi, 1/4", "-.", "0.4", {"is_causal": True, "slope": 0.25}),
        ("keys in a ball, r = 1/2", "-", "0.6", {"radius": 0.5}),
    ):
        axes.plot(LENGTHS, [gain(n, **options) for n in LENGTHS], style, color=color, label=label)
    lower = [gain(n - 1, norm="self") for n in LENGTHS]
    axes.plot(LENGTHS, lower, "^", color="black", markersize=4, label="no mask, true gain at least")
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="gain of one head, l2 norm")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=100)


def run(arguments: list[str]) -> None:
    """Draws both pictures."""
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=Path("report/pictures"), help="directory")
    options.add_argument("--steps", type=int, default=100, help="of the attack")
    given = options.parse_args(arguments)
    usable_directory(given.out)
    for name, draw in {"certificate": draw_certificate, "gain": draw_gain}.items():
        torch.manual_seed(0)
        draw(given.out / f"{name}.png", given.steps)
        print(f"written to {given.out / name}.png")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return run_recipe("recipes.pictures", run, arguments)


if __name__ == "__main__":
    sys.exit(main())
