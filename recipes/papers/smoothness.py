"""Castin, Ablin, Peyré 2024: How smooth is attention?

no gain with n tokens in a ball of radius R passes its bound, which has a limit (judged here); gains grow
like the root of n far below e^(2R^2), and on text in trained models like n^0.24 to n^0.26 (shown only).

Bounds and gains of the layer A = -I, W = I, D = 2 against n and R; median gains of attention alone on
text. Published exponents are of BERT and GPT-2, which could not be fetched, BERT's with residual and
LayerNorm. Random weights look evenly at all tokens.
"""

import math
import statistics
from itertools import product
from pathlib import Path

import torch

import lipformer as lf
from lipformer import analysis
from recipes.analysis import how_smooth, mass_splitting
from recipes.classify import minilm
from recipes.papers.experiment import Finding, Panel, Part, Row, Rows, Setting, curves

RADIUS, TOKENS = 2.0, 64
MOST = 2048  # tokens that a gain is measured with; bounds are known for more
LABELS = {"published": "Theorem 3.3", "bound": "ball_bound", "gain": "adversarial tokens"}
LABELS |= {"limit": "mean_field_bound", "measure": "two Diracs"}
MODELS, AXIS = ("random-bert", "MiniLM"), "tokens n"
PANELS = [
    Panel("n", LABELS, "", {"panel": "n"}, "xy", AXIS, "gain", f"R = {RADIUS:g}"),
    Panel("radius", LABELS, "", {"panel": "R"}, "y", "radius R", "gain", f"n = {TOKENS}"),
    *(Panel("n", "gain", "layer", {"model": name}, "x", AXIS, "gain on text", name) for name in MODELS),
]


def bounds(panel: str, sizes: list[tuple[int, float]], folder: Path) -> Rows:
    """Bounds of the layer A = -I, W = I, and its gains at adversarial tokens and measures."""
    layer = mass_splitting.attentions(2)["dot-product"]
    for n, radius in sizes:
        row: Row = {"panel": panel, "n": n, "radius": radius}
        row["published"] = math.sqrt(3.0 * (radius**4 * (4 * n + 1) + n))
        row["bound"] = analysis.ball_bound(layer, n, radius)
        if n <= MOST:
            tokens = analysis.adversarial_tokens(layer, n, radius)
            start = torch.Generator().manual_seed(0)
            row["gain"] = lf.estimate_lipschitz(layer, tokens, tol=1e-6, generator=start).value
        row["limit"] = analysis.mean_field_bound(layer, radius)
        measure = analysis.adversarial_measure(layer, radius)
        yield row | {"measure": float(analysis.measure_gain(layer, *measure))}


def model_gains(model: str, options: list[str], folder: Path) -> Rows:
    """Gains of the attention layers of a model on pieces of a text: medians for each length."""
    name = str(minilm.fetch(folder)[0].parent) if model == "MiniLM" else model
    given = how_smooth.arguments().parse_args(["--model", name, "--bound", "jasmin", *options])
    torch.manual_seed(given.seed)
    loaded, ids, around = how_smooth.load(given)
    table = how_smooth.text_gains(loaded, how_smooth.sequences(ids, around, given), given)
    for fit, n in product(table.exponents(), given.lengths):
        some = [row for row in table.rows if (row.index, row.n) == (fit.index, n)]
        row: Row = {"panel": "model", "model": model, "layer": fit.index, "n": n}
        row["gain"] = statistics.median(one.gain for one in some)
        row["share"] = max(one.gain / one.bound for one in some if one.bound)
        yield {**row, "exponent": fit.exponent, "error": fit.error}


def parts(setting: Setting) -> list[Part]:
    every, most = setting.pick((4, 8), (2, 25), (1, 25))
    text = [f"--text={setting.data / 'tinyshakespeare.txt'}"] if setting.data else []
    sizes = [(round(2 ** (k / 2)), RADIUS) for k in range(2, setting.pick(8, 41, 41), every)]
    tiny = ["--depth=1", "--width=16", "--heads=2", "--sequences=2", "--lengths", "2", "8"]
    small = ["--depth=2", "--sequences=3", "--lengths", "2", "4", "8", "16", "32"]
    options = setting.pick(tiny, small, ["--sequences=3"]) + text
    found = [
        Part("against n", bounds, ("n", sizes)),
        Part("against R", bounds, ("R", [(TOKENS, k / 8) for k in range(2, most, every)])),
        Part("random BERT type", model_gains, ("random-bert", options)),
        Part("pretrained MiniLM", model_gains, ("MiniLM", text)),
    ]
    return found if setting.level == "full" else found[:-1]


def judge(rows: list[Row]) -> Finding:
    by_n, by_radius = ([row for row in rows if row["panel"] == panel] for panel in ("n", "R"))
    shares = [row["gain"] / row["bound"] for row in by_n + by_radius if "gain" in row]
    shares += [row["measure"] / row["limit"] for row in by_radius]
    shares += [row["share"] for row in rows if row["panel"] == "model"]
    sound = max(shares) <= 1.0 and all(r["bound"] <= min(r["published"], r["limit"]) for r in by_n)
    points = [(math.log(row["n"] - 1), math.log(row["gain"])) for row in by_n if row["n"] <= TOKENS]
    slope = statistics.linear_regression(*zip(*points, strict=True)).slope
    real = curves(rows, "layer", "exponent", model="MiniLM").get(None, {}).values()
    told = f"n^{min(real):.2f} to n^{max(real):.2f} in MiniLM" if real else "not measured in small"
    last = by_n[-1]
    return Finding(
        sound,
        f"gains are at most {max(shares):.2f} of a bound; not judged: adversarial gains like "
        f"(n-1)^{slope:.2f} to n = {TOKENS}, and on text {told}",
        f"At n = {last['n']} `ball_bound` is {last['published'] / last['bound']:.3g} times below "
        f"Theorem 3.3 and {last['bound'] / last['limit']:.4f} of `mean_field_bound`, of which two "
        f"Diracs reach {last['measure'] / last['limit']:.2f}.",
    )
