"""A residual block of L2 attention is inverted by iteration; one of dot-product attention may not be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import lipformer as lf
from recipes.papers.experiment import Experiment, Finding, Part, Row, Setting, curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIM, HEADS, TOKENS, TOLERANCE = 64, 8, 64, 1e-5
COEFFS, SCALES, SHOWN = (0.5, 0.7, 0.9), (1.0, 3.0, 10.0, 30.0, 100.0), 10.0
LAYERS = ("L2", "dot-product", "dot-product / gain")


def _branch(name: str, coeff: float) -> Callable[[Tensor], Tensor]:
    """L2 attention divided by its certificate, or dot-product attention of matrices of norm 1."""
    if name == "L2":
        attention = lf.L2MultiheadAttention(DIM, HEADS, bias=False, batch_first=True)
        return lf.InvertibleResidual(attention, coeff, norm="l2", seq_len=TOKENS).double().branch
    layer = nn.MultiheadAttention(DIM, HEADS, bias=False, batch_first=True).double()
    for weight in (*layer.in_proj_weight.chunk(3), layer.out_proj.weight):
        weight /= torch.linalg.matrix_norm(weight, 2)
    layer.out_proj.weight *= coeff / (lf.functional.l2_gain(TOKENS) if "gain" in name else 1.0)
    return lambda x: layer(x, x, x, need_weights=False)[0]


@torch.no_grad()
def measure(name: str, batch: int, iterations: int, folder: Path) -> list[Row]:
    """The largest error of x_{k+1} = y - f(x_k) over a batch, for y = x + f(x) and x_0 = y."""
    rows = []
    for coeff in COEFFS:
        torch.manual_seed(0)
        branch = _branch(name, coeff)
        for scale in SCALES:
            x = scale * torch.randn(batch, TOKENS, DIM).double()
            found = y = x + branch(x)
            for k in range(1, iterations + 1):
                found = y - branch(found)
                error = (found - x).abs().max().item()
                row = {"layer": name, "c": coeff, "size": scale, "iterations": k, "error": error}
                if k == iterations:
                    rows.append(row | {"last": error})
                elif scale == SHOWN:
                    rows.append(row)
    return rows


def _parts(setting: Setting) -> list[Part]:
    batch, iterations = setting.pick((1, 8), (8, 30), (128, 30))
    return [Part(name, partial(measure, name, batch, iterations)) for name in LAYERS]


def _draw(rows: list[Row], figure: Figure) -> None:
    *left, right = figure.subplots(1, 3, sharey=True)
    for axes, name in zip(left, LAYERS, strict=False):
        for coeff, steps, errors in curves(rows, "c", "iterations", "error", layer=name, size=SHOWN):
            axes.semilogy(steps, errors, label=f"c = {coeff}", markevery=5)
        axes.set(title=f"{name}, size {SHOWN:g}", xlabel="iterations")
    for name, sizes, errors in curves(rows, "layer", "size", "last", c=COEFFS[-1]):
        right.loglog(sizes, errors, label=name)
    right.set(title=f"after the last, c = {COEFFS[-1]}", xlabel="size of the tokens")
    left[0].set_ylabel("largest error")
    left[0].legend()
    right.legend(fontsize="small")


def _judge(rows: list[Row]) -> Finding:
    last = {name: errors for name, _, errors in curves(rows, "layer", "size", "last", c=COEFFS[-1])}
    worst = {name: max(errors) for name, errors in last.items()}
    return Finding(
        worst["L2"] <= TOLERANCE < min(worst[name] for name in LAYERS[1:]),
        f"at c = {COEFFS[-1]} the largest error at any size of the tokens is {worst['L2']:.1g} for L2, "
        f"{worst[LAYERS[1]]:.2g} for dot-product, {worst[LAYERS[2]]:.2g} if it is divided by L2's gain",
        f"{HEADS} heads, N = D = {TOKENS}, Gaussian tokens, float64. L2 attention is divided by its "
        "certificate. Dot-product attention has none: its matrices have norm 1, and it is divided by "
        "nothing, or by the gain of a head of L2 attention. Of small tokens it is inverted as well.",
    )


EXPERIMENT = Experiment(
    name="inversion",
    title="Inverting x + c f(x) by iteration",
    source="Kim et al. 2021, figure 2",
    claim="for L2 attention the iteration converges, for dot-product attention it need not.",
    caption="Largest error over a batch against iterations, and in the end against the tokens' size.",
    parts=_parts,
    table=lambda rows: [
        {"layer": name, **{f"size {s:g}": e for s, e in zip(sizes, errors, strict=True)}}
        for name, sizes, errors in curves(rows, "layer", "size", "last", c=COEFFS[-1])
    ],
    draw=_draw,
    judge=_judge,
)
