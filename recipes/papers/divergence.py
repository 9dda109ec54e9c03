"""Kim et al. 2021, section 3: Dot-product attention has no Lipschitz constant.

the Jacobian of dot-product attention is not bounded; that of L2 attention is.

Largest spectral norm of the Jacobian over random inputs against their size.
"""

from pathlib import Path

import torch
from torch import nn

import lipformer as lf
from recipes.papers.experiment import Finding, Panel, Part, Row, Rows, Setting, curves

DIM, HEADS, TOKENS = 16, 2, 8
LAYERS = {"dot-product": nn.MultiheadAttention, "L2": lf.L2MultiheadAttention}
LINES = {"gain": "largest gain found", "certificate": "certificate for every input"}
SIZE, GAIN = "standard deviation of the tokens", "gain (spectral norm of the Jacobian)"
PANELS = [Panel("scale", LINES, "layer", {}, "xy", SIZE, GAIN)]


def measure(name: str, scales: list[float], seeds: int, folder: Path) -> Rows:
    """The largest gain over some inputs of each size."""
    torch.manual_seed(0)
    layer = LAYERS[name](DIM, HEADS, bias=False, batch_first=True).double()
    bound = lf.certify(layer, seq_len=TOKENS).bound if name == "L2" else None
    for scale in scales:
        gains = []
        for seed in range(seeds):
            x = scale * torch.randn(1, TOKENS, DIM, generator=torch.Generator().manual_seed(seed))
            x[:, 0] = 0.0  # there the softmax of dot products is even, however large the rest
            found = lf.estimate_lipschitz(lambda z: layer(z, z, z, need_weights=False)[0], x.double())
            gains.append(found.value)
        yield {"layer": name, "scale": scale, "gain": max(gains), "certificate": bound}


def parts(setting: Setting) -> list[Part]:
    scales = [10.0 ** (k / 2) for k in range(-4, setting.pick(3, 9, 9))]
    return [Part(name, measure, (name, scales, setting.pick(1, 3, 20))) for name in LAYERS]


def judge(rows: list[Row]) -> Finding:
    gains = curves(rows, "scale", "gain", "layer")
    dot, ours = list(gains["dot-product"].values()), max(gains["L2"].values())
    ub = max(row["certificate"] or 0.0 for row in rows)
    return Finding(
        dot[-1] > max(10.0 * dot[0], 5.0 * dot[-2]) and ours <= ub,
        f"dot-product {dot[-1]:.3g}, growing with the input squared, L2 {ours:.3g}, certified {ub:.3g}",
        f"One layer of {HEADS} heads, D = {DIM}, {TOKENS} tokens of which one is zero.",
    )
