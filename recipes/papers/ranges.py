"""Kim et al. 2021, section 5: Output ranges of attention.

outputs of trained L2 attention are about as wide as its inputs, of dot-product attention much wider.

Width of the outputs of attention over that of its inputs, the largest of two layers, D = 64, characters.
Published models are larger and were trained for longer.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lipformer as lf
from recipes.papers.experiment import Finding, Panel, Part, Row, Rows, Setting, curves
from training.corpus import embedded_text, encode, from_dir, text_of

VARIANTS, SHARES = ("dot_product", "l2", "contractive"), {"all": 1.0, "middle 99%": 0.99}
LONG = 600  # updates from which the claim is judged
SIZES, BLOCK, BATCH = {"dim": 64, "num_heads": 4, "num_layers": 2}, 64, 16
RATIO, NEAR = "width of outputs / inputs", 2.0  # the factor within which widths are about the same
PANELS = [Panel("updates", s, "variant", {}, "", "updates", RATIO, f"{s} entries") for s in SHARES]


@torch.no_grad()
def ratios(model: Any, tokens: Tensor) -> Row:
    """Widths of attention's outputs over those of its inputs, the largest of all layers."""

    def width(x: Tensor, share: float) -> float:
        """Of the interval that holds the middle share of all entries."""
        return x.flatten().quantile(torch.tensor([0.5 - share / 2, 0.5 + share / 2])).diff().item()

    x, found = model.embed(tokens), []
    for attention, feed_forward in zip(model.trunk[::2], model.trunk[1::2], strict=True):
        given, y = attention.branch[0](x), attention(x)  # x + f(norm(x))
        found.append({name: width(y - x, s) / width(given, s) for name, s in SHARES.items()})
        x = feed_forward(y)
    return {name: max(layer[name] for layer in found) for name in SHARES}


def measure(variant: str, steps: int, data: Path | None, folder: Path) -> Rows:
    """Trains a model on characters; the ratios along the way."""
    text = embedded_text() if data is None else text_of(from_dir(str(data / "ptb"))["train"], "ptb")
    codes = encode(text, "".join(sorted(set(text))))
    torch.manual_seed(0)
    model = getattr(lf.models, variant)(vocab_size=int(codes.max()) + 1, max_len=BLOCK, **SIZES)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps + 1):
        batch = codes[torch.randint(len(codes) - BLOCK, (BATCH, 1)) + torch.arange(BLOCK + 1)]
        loss = F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:])
        if step % (steps // 5) == 0:
            row = {"variant": variant, "updates": step, "nats": loss.item()}
            yield row | ratios(model, batch[:, :-1])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def parts(setting: Setting) -> list[Part]:
    steps = setting.pick(5, 100, LONG)
    return [Part(name, measure, (name, steps, setting.data)) for name in VARIANTS]


def judge(rows: list[Row]) -> Finding:
    wide = {k: list(v.values()) for k, v in curves(rows, "updates", "all", "variant").items()}
    told = ", ".join(f"{name} {found[0]:.2f} and {found[-1]:.2f}" for name, found in wide.items())
    ours, dot, steps = wide["l2"][-1], wide["dot_product"][-1], rows[-1]["updates"]
    near, wider = 1.0 / NEAR <= ours <= NEAR, dot > NEAR * ours
    return Finding(
        near and (wider or None) if steps >= LONG else None,
        f"width of outputs over inputs at first and after {steps} updates: {told}",
        f"L2's ratio is {'' if near else 'not '}within a factor of {NEAR:g} of 1; one of dot-product "
        f"attention {NEAR:g} times as large is {'' if wider else 'not '}seen.",
    )
