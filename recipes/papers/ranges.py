"""How wide the outputs of attention are beside its inputs, at first and in training."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lipformer as lf
from recipes.papers.experiment import Experiment, Finding, Part, Row, Setting, curves
from training.corpus import embedded_text, encode, from_dir, text_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIANTS, SHARES = ("dot_product", "l2", "contractive"), {"all": 1.0, "middle 99%": 0.99}
SIZES, BLOCK, BATCH = {"dim": 64, "num_heads": 4, "num_layers": 2}, 64, 16


def _width(x: Tensor, share: float) -> float:
    """Of the interval that holds the middle share of all entries."""
    return x.flatten().quantile(torch.tensor([0.5 - share / 2, 0.5 + share / 2])).diff().item()


@torch.no_grad()
def ratios(model: Any, tokens: Tensor) -> Row:
    """Widths of attention's outputs over those of its inputs, the largest of all layers."""
    x, found = model.embed(tokens), []
    for block in model.trunk:  # x + f(norm(x)): attention and feed-forward take turns
        after = block(x)
        found.append(
            {k: _width(after - x, s) / _width(block.branch[0](x), s) for k, s in SHARES.items()}
        )
        x = after
    return {name: max(layer[name] for layer in found[::2]) for name in SHARES}


def measure(variant: str, steps: int, data: Path | None, folder: Path) -> list[Row]:
    """Trains a model on characters; the ratios along the way."""
    text = embedded_text() if data is None else text_of(from_dir(str(data / "ptb"))["train"], "ptb")
    codes = encode(text, "".join(sorted(set(text))))
    torch.manual_seed(0)
    model = getattr(lf.models, variant)(vocab_size=int(codes.max()) + 1, max_len=BLOCK, **SIZES)
    optimiser, rows = torch.optim.AdamW(model.parameters(), lr=2e-3), []
    for step in range(steps + 1):
        batch = codes[torch.randint(len(codes) - BLOCK, (BATCH, 1)) + torch.arange(BLOCK + 1)]
        loss = F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:])
        if step % (steps // 5) == 0:
            row = {"variant": variant, "updates": step, "nats": loss.item()}
            rows.append(row | ratios(model, batch[:, :-1]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return rows


def _parts(setting: Setting) -> list[Part]:
    steps = setting.pick(5, 100, 600)
    return [Part(name, partial(measure, name, steps, setting.data)) for name in VARIANTS]


def _draw(rows: list[Row], figure: Figure) -> None:
    for axes, share in zip(figure.subplots(1, 2, sharey=True), SHARES, strict=True):
        for name, steps, widths in curves(rows, "variant", "updates", share):
            axes.plot(steps, widths, label=name)
        axes.set(title=f"{share} entries", xlabel="updates")
    figure.axes[0].set_ylabel("width of outputs / inputs")
    figure.axes[0].legend()


def _judge(rows: list[Row]) -> Finding:
    wide = {name: found for name, _, found in curves(rows, "variant", "updates", "all")}
    told = ", ".join(f"{name} {found[0]:.2f} and {found[-1]:.2f}" for name, found in wide.items())
    return Finding(
        wide["dot_product"][-1] > 2.0 * wide["l2"][-1] or None,
        f"width of outputs over inputs at first and after {rows[-1]['updates']} updates: {told}",
        "Characters, two layers, D = 64; the widest layer counts. Published models are larger and were "
        "trained for longer: a gap that is not seen here is not refuted.",
    )


EXPERIMENT = Experiment(
    name="ranges",
    title="Output ranges of attention",
    source="Kim et al. 2021, section 5",
    claim="outputs of trained L2 attention are about as wide as its inputs, of dot-product attention "
    "much wider.",
    caption="Width of the outputs of attention over that of its inputs, the largest of two layers.",
    parts=_parts,
    table=lambda rows: [row for row in rows if row["updates"] in (0, rows[-1]["updates"])],
    draw=_draw,
    judge=_judge,
)
