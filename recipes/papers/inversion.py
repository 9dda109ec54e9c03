"""Kim et al. 2021, figure 2: Inverting x + c f(x) by iteration.

for L2 attention the iteration converges, for dot-product attention it need not.

Largest error over a batch against iterations for tokens of size 10, and in the end against their size.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import lipformer as lf
from recipes.papers.experiment import Finding, Panel, Part, Row, Rows, Setting, curves

DIM, HEADS, TOKENS, TOLERANCE = 64, 8, 64, 1e-5
COEFFS, SCALES, SHOWN, COEFF = (0.5, 0.7, 0.9), (1.0, 3.0, 10.0, 30.0, 100.0), 10.0, 0.9
LAYERS, ERROR, END = ("L2", "dot-product", "dot-product / gain"), "largest error", "last, c = 0.9"
SHARED = ("y", "iterations", ERROR)
PANELS = [Panel("iterations", "error", "c", {"layer": k, "size": SHOWN}, *SHARED, k) for k in LAYERS]
PANELS += [Panel("size", "last", "layer", {"c": COEFF}, "xy", "size of the tokens", ERROR, END)]


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
def measure(name: str, batch: int, iterations: int, folder: Path) -> Rows:
    """The largest error of x_{k+1} = y - f(x_k) over a batch, for y = x + f(x) and x_0 = y."""
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
                    yield row | {"last": error}
                elif scale == SHOWN:
                    yield row


def parts(setting: Setting) -> list[Part]:
    sizes = setting.pick((1, 8), (8, 30), (128, 30))
    return [Part(name, measure, (name, *sizes)) for name in LAYERS]


def judge(rows: list[Row]) -> Finding:
    last = curves(rows, "size", "last", "layer", c=COEFF)
    ours, dot, divided = (max(last[name].values()) for name in LAYERS)
    return Finding(
        ours <= TOLERANCE < min(dot, divided),
        f"at c = 0.9 the largest error at any size of the tokens is {ours:.1g} for L2, {dot:.2g} for "
        f"dot-product, {divided:.2g} if it is divided by L2's gain",
        f"{HEADS} heads, N = D = {TOKENS}, Gaussian tokens, float64. L2 attention is divided by its "
        "certificate; dot-product attention has none, and its matrices have norm 1.",
    )
