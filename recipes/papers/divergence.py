"""Dot-product attention is steeper the larger its input is, without limit; L2 attention is not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import lipformer as lf
from recipes.papers.experiment import Experiment, Finding, Part, Row, Setting, curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIM, HEADS, TOKENS = 16, 2, 8
LAYERS = ("dot-product", "L2")


def _tokens(scale: float, seed: int) -> Tensor:
    """Of which the first is zero: there the softmax of dot products is even, however large the rest."""
    drawn = scale * torch.randn(1, TOKENS, DIM, generator=torch.Generator().manual_seed(seed))
    return drawn.double() * (torch.arange(TOKENS) > 0)[:, None]


def _layer(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind = nn.MultiheadAttention if name == "dot-product" else lf.L2MultiheadAttention
    return kind(DIM, HEADS, bias=False, batch_first=True).double()


def measure(name: str, scales: list[float], seeds: int, folder: Path) -> list[Row]:
    """The largest gain over some inputs of each size."""
    layer = _layer(name)
    bound = lf.certify(layer, seq_len=TOKENS).bound if name == "L2" else None

    def attend(x: Tensor) -> Tensor:
        return layer(x, x, x, need_weights=False)[0]

    gains = {
        scale: max(lf.estimate_lipschitz(attend, _tokens(scale, seed)).value for seed in range(seeds))
        for scale in scales
    }
    return [{"layer": name, "scale": s, "gain": g, "certificate": bound} for s, g in gains.items()]


def _parts(setting: Setting) -> list[Part]:
    scales = [10.0 ** (k / 2) for k in range(-4, setting.pick(3, 9, 9))]
    seeds = setting.pick(1, 3, 20)
    return [Part(name, partial(measure, name, scales, seeds)) for name in LAYERS]


def _draw(rows: list[Row], figure: Figure) -> None:
    axes = figure.subplots()
    for name, scales, gains in curves(rows, "layer", "scale", "gain"):
        axes.loglog(scales, gains, label=f"{name}, largest gain found")
    bound = next(row["certificate"] for row in rows if row["certificate"])
    axes.axhline(bound, color="gray", linestyle="--", label="L2, certificate for every input")
    axes.set(xlabel="standard deviation of the tokens", ylabel="gain (spectral norm of the Jacobian)")
    axes.legend()


def _judge(rows: list[Row]) -> Finding:
    gain = {name: (found[0], max(found)) for name, _, found in curves(rows, "layer", "scale", "gain")}
    bound = next(row["certificate"] for row in rows if row["certificate"])
    growth = gain["dot-product"][1] / gain["dot-product"][0]
    return Finding(
        growth > 10.0 and gain["L2"][1] <= bound,
        f"dot-product {gain['dot-product'][1]:.3g} and growing with the square of the input, L2 at most "
        f"{gain['L2'][1]:.3g}, certified {bound:.3g}",
        f"One layer of {HEADS} heads, D = {DIM}, {TOKENS} tokens of which one is zero.",
    )


EXPERIMENT = Experiment(
    name="divergence",
    title="Dot-product attention has no Lipschitz constant",
    source="Kim et al. 2021, section 3",
    claim="the Jacobian of dot-product attention is not bounded; that of L2 attention is.",
    caption="Largest spectral norm of the Jacobian over random inputs against their size.",
    parts=_parts,
    table=lambda rows: [
        {"layer": n, **{f"{s:.3g}": f"{g:.4g}" for s, g in list(zip(x, y, strict=True))[::2]}}
        for n, x, y in curves(rows, "layer", "scale", "gain")
    ],
    draw=_draw,
    judge=_judge,
)
