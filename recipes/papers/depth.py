"""How deep a post-norm Transformer trains at a fixed learning rate without warm-up."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.papers.characters import mean_over_seeds, trained
from recipes.papers.experiment import Experiment, Finding, Part, Row, Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIANTS = ("dot_product", "l2", "contractive")
SEVERAL_SEEDS = 10
"""Up to so many layers there are three seeds."""
RATE = "0.001"
MARGIN = 0.3
"""Nats above the model of two layers from which a run counts as failed."""


def measure(variant: str, layers: int, seed: int, setting: Setting, folder: Path) -> Row:
    """One run: nats of part of the validation text."""
    options = ["--model.config.num_layers", str(layers), "--model.config.norm_place", "post"]
    options += ["--model.config.dim", setting.pick("16", "64", "64"), "--data.block", "64"]
    options += ["--model.config.token_shift", "true", "--data.batch_size", "16", "--model.lr", RATE]
    options += ["--model.schedule", "constant", "--model.warmup", "0"]
    options += ["--trainer.limit_val_batches", setting.pick("1", "50", "50")]
    found = trained(folder, setting, variant, seed, setting.pick(2, 100, 400), *options)
    return {"variant": variant, "layers": layers, **found}


def _parts(setting: Setting) -> list[Part]:
    deep = (2, 4, 6, 8, 10, 12, 14, 16, 18, 24, 32, 48)
    return [
        Part(f"{v} {n} {s}", partial(measure, v, n, s, setting), n)
        for s in range(setting.pick(1, 1, 3))
        for n in setting.pick((2,), (2, 6, 12), deep)
        for v in VARIANTS
        if s == 0 or n <= SEVERAL_SEEDS
    ]


def _failed(rows: list[Row], variant: str) -> list[int]:
    """Numbers of layers at which some seed was not a number or far above the shallowest model."""
    first = mean_over_seeds(rows, "nats", variant=variant)
    limit = first[min(first)].mean + MARGIN
    bad = {r["layers"] for r in rows if r["variant"] == variant and not r.get("nats", math.inf) <= limit}
    return sorted(bad)


def _table(rows: list[Row]) -> list[Row]:
    return [
        {
            "variant": variant,
            **{
                f"{n}": found.text for n, found in mean_over_seeds(rows, "nats", variant=variant).items()
            },
            "failed": ", ".join(map(str, _failed(rows, variant))) or "none",
        }
        for variant in dict.fromkeys(row["variant"] for row in rows)
    ]


def _draw(rows: list[Row], figure: Figure) -> None:
    axes = figure.subplots()
    for variant in dict.fromkeys(row["variant"] for row in rows):
        nats = mean_over_seeds(rows, "nats", variant=variant)
        kept = [n for n in nats if math.isfinite(nats[n].mean)]
        axes.plot(kept, [nats[n].mean for n in kept], label=variant)
    axes.set(xlabel="layers", ylabel="validation text, nats per character")
    axes.legend()


def _judge(rows: list[Row]) -> Finding:
    deepest = {v: max(r["layers"] for r in rows if r["variant"] == v) for v in VARIANTS}
    failed = {v: _failed(rows, v) for v in VARIANTS}
    told = {
        v: f"fails at {', '.join(map(str, bad))}" if bad else f"trains to {deepest[v]}"
        for v, bad in failed.items()
    }
    ours = any(deepest[v] >= 32 and not [n for n in failed[v] if n <= 32] for v in VARIANTS[1:])
    baseline = "" if failed["dot_product"] else "Dot-product attention does not fail here. "
    return Finding(
        ours if max(deepest.values()) >= 32 else None,
        "; ".join(f"{v} {text}" for v, text in told.items()) + " layers",
        f"{baseline}D = 64, AdamW at {RATE} from the first step on, post-norm, a token shift in all "
        f"variants, {rows[0]['steps']} steps of 16 x 64 characters. Failed: NaN, or {MARGIN} nats above "
        "the model of 2 layers.",
    )


EXPERIMENT = Experiment(
    name="depth",
    title="Depth at a fixed learning rate",
    source="Kim et al. 2021, figure 4",
    claim="dot-product attention fails to train beyond 10 layers, L2 attention trains to 18.",
    caption="Nats per character of the validation text against depth; missing points are not a number.",
    parts=_parts,
    table=_table,
    draw=_draw,
    judge=_judge,
)
