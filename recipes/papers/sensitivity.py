"""How far dot-product attention moves for a finite step, and what that certifies.

At full size CIFAR-10 and SVHN, too, if --data has directories cifar10 (filled by recipes.vision.fetch)
and svhn (a copy of ufldl-stanford/svhn on the hub).
"""

from __future__ import annotations

import csv
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from recipes.analysis import lofast
from recipes.papers.experiment import Experiment, Finding, Part, Row, Setting, curves
from recipes.vision.__main__ import main as vision
from training.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPS, NEAR = 0.1, 36 / 255
VARIANTS = {"dot_product": "dot products", "l2": "L2"}
PUBLISHED = (
    {"model": "Havens et al., CIFAR-10", "36/255": "certified above 0, no table at hand"},
    {"model": "LipShiFT (no attention), CIFAR-10, from memory", "0": "71.8%", "36/255": "- / 63.2%"},
)


def movement(residual: str, depths: int, size: int, samples: int, folder: Path) -> list[Row]:
    """Movement / eps by an attack and as both bounds allow, over eps and through random layers."""
    rows = []
    for depth, eps in product(range(1, depths + 1), lofast.RADII):
        torch.manual_seed(0)
        layers = [lofast.random_maps("generic", size, 4) for _ in range(depth)]
        x = lofast.random_tokens("generic", samples, size, size)
        found = lofast.movement(layers, x, eps, *lofast.RESIDUALS[residual], steps=40)
        rows.append({"panel": "movement", "residual": residual, "depth": depth, "eps": eps, **found})
    return rows


def accuracy(name: str, variant: str, options: list[str], folder: Path) -> list[Row]:
    """Trains a Vision Transformer by its YAML file; its accuracies for each eps."""
    config = Path(__file__).parents[1] / "vision" / f"{name}_{variant}.yaml"
    given = [f"--config={config}", f"--out={folder}", "--trainer.enable_progress_bar=false", *options]
    if vision(["fit", *given]):
        raise BadInput(f"python -m recipes.vision fit {' '.join(given)} failed; its error stands above")
    with (folder / "accuracy.csv").open(encoding="utf-8", newline="") as file:
        found = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    clean = found[0]["clean"]
    rows = [{"eps": 0.0, "clean": clean, "pgd": clean, "certified": clean}, *found]
    return [{"panel": "accuracy", "model": f"{VARIANTS[variant]}, {name}", **row} for row in rows]


def _parts(setting: Setting) -> list[Part]:
    sizes = setting.pick((1, 4, 2), (3, 16, 4), (5, 16, 8))
    tiny = ["--trainer.max_steps=4", "--trainer.val_check_interval=4", "--report.images=20"]
    tiny += ["--report.attack_steps=2", "--report.attack_restarts=1"]
    small = ["--trainer.max_steps=200", "--report.images=100"]
    runs = {"digits": setting.pick(tiny, small, [])}
    for name, option in (("cifar10", "directory"), ("svhn", "hub")):
        if setting.data and setting.level == "full" and (setting.data / name).is_dir():
            runs[name] = [f"--data.{option}={setting.data / name}"]
    found = [Part(f"residual {k}", partial(movement, r, *sizes)) for k, r in enumerate(lofast.RESIDUALS)]
    for (name, options), variant in product(runs.items(), VARIANTS):
        found.append(Part(f"{name} {variant}", partial(accuracy, name, variant, options), 2.0))
    return found


def _table(rows: list[Row]) -> list[Row]:
    found: dict[str, Row] = {}
    for row in [row for row in rows if row["panel"] == "accuracy"]:
        eps = f"{row['eps'] * 255:.0f}/255" if 0 < row["eps"] < 0.5 else f"{row['eps']:g}"
        both = f"{row['pgd']:.1%} / {row['certified']:.1%}" if row["eps"] else f"{row['clean']:.1%}"
        found.setdefault(row["model"], {"model": row["model"]})[eps] = both
    return [*found.values(), *PUBLISHED]


def _draw(rows: list[Row], figure: Figure) -> None:
    left, middle, right = figure.subplots(1, 3)
    for column in ("plain", "refined", "attack"):
        for _, xs, ys in curves(rows, "residual", "eps", column, depth=1, residual="x + f(x)"):
            left.loglog(xs, ys, label=column)
        for residual, xs, ys in curves(rows, "residual", "depth", column, eps=EPS):
            middle.semilogy(xs, ys, label=f"{column}, {residual}")
    for column, label in (("pgd", "attacked"), ("certified", "certified")):
        for model, xs, ys in curves(rows, "model", "eps", column, panel="accuracy"):
            right.plot(xs, ys, label=f"{model}, {label}")
    left.set(xlabel="eps, one layer x + f(x)", title="movement / eps")
    middle.set(xlabel=f"layers, eps = {EPS:g}", title="movement / eps")
    right.set(xlabel="eps, l2 norm of pixels", title="accuracy", ylim=(0, 1))
    for axes in (left, middle, right):
        axes.legend(fontsize=6)


def _judge(rows: list[Row]) -> Finding:
    steps, judged = ([r for r in rows if r["panel"] == panel] for panel in ("movement", "accuracy"))
    share, deepest = max(row["share"] for row in steps), max(row["depth"] for row in steps)
    shown = "; ".join(
        f"{row['attack']:.3g}, {row['refined']:.3g} and {row['plain']:.3g} for {row['residual']}"
        for row in steps
        if (row["depth"], row["eps"]) == (deepest, EPS)
    )
    near = [f"{row['certified']:.1%} ({row['model']})" for row in judged if row["eps"] == NEAR]
    return Finding(
        share <= 1.0 and all(row["pgd"] >= row["certified"] for row in judged),
        f"an attack reaches at most {share:.3f} of a bound; certified at 36/255: {', '.join(near)}",
        f"Movement / eps at eps = {EPS:g} through {deepest} random layers by attack, refined and plain "
        f"bound (medians): {shown}. Table: accuracy at eps = 0, then under PGD / certified, one seed. "
        "Theirs is on CIFAR-10: recipes/vision/README.md has ours, and --data with cifar10 measures it. "
        "Ours has a refined bound, convex residuals, tokens in a ball and a margin in the loss.",
    )


EXPERIMENT = Experiment(
    name="sensitivity",
    title="LoFAST: finite steps, and certified accuracy",
    source="Havens et al. 2024",
    claim="a bound around each input certifies standard attention on CIFAR-10 at 36/255.",
    caption="Movement over eps and through depth; accuracy under attack and certified.",
    parts=_parts,
    table=_table,
    draw=_draw,
    judge=_judge,
)
