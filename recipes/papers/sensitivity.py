"""Havens et al. 2024: LoFAST: finite steps, and certified accuracy.

a bound around each input certifies standard attention at 36/255 (published: CIFAR-10; here: digits).

Movement over eps and through depth of random layers, medians over inputs; accuracy of one seed on the
digits, under attack (pgd) and certified. recipes/vision/README.md has CIFAR-10. Ours has a refined
bound, convex residuals, tokens in a ball and a margin in the loss.
"""

import csv
from itertools import product
from pathlib import Path

import torch

from recipes.analysis import lofast
from recipes.papers.experiment import Finding, Panel, Part, Row, Rows, Setting
from recipes.vision.__main__ import main as vision
from training.errors import BadInput

EPS, NEAR, ONE = 0.1, 36 / 255, {"depth": 1, "residual": "x + f(x)"}
VARIANTS = {"dot_product": "dot products, digits", "l2": "L2, digits"}
PANELS = [
    Panel("eps", lofast.LINES, "", ONE, "xy", "eps, one layer x + f(x)", lofast.MOVED),
    Panel("depth", lofast.LINES, "residual", {"eps": EPS}, "y", f"layers, eps = {EPS:g}", lofast.MOVED),
    Panel("eps", {"pgd": "pgd", "certified": "certified"}, "model", {}, "", "eps (l2)", "accuracy"),
]


def movement(residual: str, depths: int, size: int, samples: int, folder: Path) -> Rows:
    """Movement / eps by an attack and as both bounds allow, over eps and through random layers."""
    for depth, eps in product(range(1, depths + 1), lofast.RADII):
        torch.manual_seed(0)
        layers = [lofast.random_maps("generic", size, 4) for _ in range(depth)]
        x = lofast.random_tokens("generic", samples, size, size)
        found = lofast.movement(layers, x, eps, *lofast.RESIDUALS[residual], steps=40)
        yield {"panel": "movement", "residual": residual, "depth": depth, "eps": eps, **found}


def accuracy(variant: str, options: list[str], folder: Path) -> Rows:
    """Trains a Vision Transformer by its YAML file; its accuracies for each eps."""
    config = Path(__file__).parents[1] / "vision" / f"digits_{variant}.yaml"
    given = [f"--config={config}", f"--out={folder}", "--trainer.enable_progress_bar=false", *options]
    if vision(["fit", *given]):
        raise BadInput(f"python -m recipes.vision fit {' '.join(given)} failed; its error stands above")
    with (folder / "accuracy.csv").open(encoding="utf-8", newline="") as file:
        found = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    clean = found[0]["clean"]
    for row in [{"eps": 0.0, "clean": clean, "pgd": clean, "certified": clean}, *found]:
        yield {"panel": "accuracy", "model": VARIANTS[variant], **row}


def parts(setting: Setting) -> list[Part]:
    sizes = setting.pick((1, 4, 2), (3, 16, 4), (5, 16, 8))
    tiny = ["--trainer.max_steps=4", "--trainer.val_check_interval=4", "--report.images=20"]
    tiny += ["--report.attack_steps=2", "--report.attack_restarts=1"]
    options = setting.pick(tiny, ["--trainer.max_steps=200", "--report.images=100"], [])
    found = [Part(f"residual {k}", movement, (r, *sizes)) for k, r in enumerate(lofast.RESIDUALS)]
    return found + [Part(f"digits {variant}", accuracy, (variant, options)) for variant in VARIANTS]


def judge(rows: list[Row]) -> Finding:
    moved, judged = ([r for r in rows if r["panel"] == panel] for panel in ("movement", "accuracy"))
    share, deepest = max(row["share"] for row in moved), max(row["depth"] for row in moved)
    last = [row for row in moved if (row["depth"], row["eps"]) == (deepest, EPS)]
    shown = ["{attack:.3g}, {refined:.3g}, {plain:.3g} for {residual}".format(**row) for row in last]
    near = {row["model"]: row["certified"] for row in judged if row["eps"] == NEAR}
    told = ", ".join(f"{certified:.1%} ({model})" for model, certified in near.items())
    sound = share <= 1.0 and all(row["pgd"] >= row["certified"] for row in judged)
    return Finding(
        sound and (min(near.values()) > 0.5 or None),
        f"an attack reaches at most {share:.3f} of a bound; certified at 36/255: {told}",
        f"Through {deepest} layers an attack, the refined and the plain bound allow a movement / eps of "
        f"{'; '.join(shown)} (eps = {EPS:g}).",
    )
