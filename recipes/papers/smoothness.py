"""How smooth dot-product attention is on a ball, on text and on measures."""

from __future__ import annotations

import math
import statistics
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import lipformer as lf
from lipformer import analysis
from recipes.analysis import how_smooth, mass_splitting
from recipes.classify import minilm
from recipes.papers.experiment import Experiment, Finding, Part, Row, Setting, curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RADIUS, TOKENS = 2.0, 64
MOST = 2048  # tokens that a gain is measured with; bounds are known for more
LABELS = {"published": "Theorem 3.3", "bound": "ball_bound", "gain": "adversarial tokens"}
LABELS |= {"limit": "mean_field_bound", "measure": "two Diracs"}


def bounds(panel: str, sizes: list[tuple[int, float]], folder: Path) -> list[Row]:
    """Bounds of the layer A = -I, W = I, and its gains at adversarial tokens and measures."""
    layer, rows = mass_splitting.attentions(2)["dot-product"], []
    for n, radius in sizes:
        row: Row = {"panel": panel, "n": n, "radius": radius}
        row["published"] = math.sqrt(3.0 * (radius**4 * (4 * n + 1) + n))
        row["bound"] = analysis.ball_bound(layer, n, radius)
        if n <= MOST:
            tokens, start = (
                analysis.adversarial_tokens(layer, n, radius),
                torch.Generator().manual_seed(0),
            )
            row["gain"] = lf.estimate_lipschitz(layer, tokens, tol=1e-6, generator=start).value
        row["limit"] = analysis.mean_field_bound(layer, radius)
        row["measure"] = float(
            analysis.measure_gain(layer, *analysis.adversarial_measure(layer, radius))
        )
        rows.append(row)
    return rows


def model_gains(model: str, options: list[str], folder: Path) -> list[Row]:
    """Gains of the attention layers of a model on pieces of a text: medians for each length."""
    name = str(minilm.fetch(folder)[0].parent) if model == "MiniLM" else model
    given = how_smooth.arguments().parse_args(["--model", name, "--bound", "jasmin", *options])
    torch.manual_seed(given.seed)
    loaded, ids, around = how_smooth.load(given)
    table = how_smooth.text_gains(loaded, how_smooth.sequences(ids, around, given), given)
    rows: list[Row] = []
    for fit, n in product(table.exponents(), given.lengths):
        some = [row for row in table.rows if (row.index, row.n) == (fit.index, n)]
        row: Row = {"panel": "model", "model": model, "layer": fit.index, "n": n}
        row["gain"] = statistics.median(one.gain for one in some)
        row["share"] = max(one.gain / one.bound for one in some if one.bound)
        rows.append({**row, "exponent": fit.exponent, "error": fit.error})
    return rows


def splitting(radii: list[float], draws: int, folder: Path) -> list[Row]:
    """For each kind of cloud, that whose gain on measures splitting mass adds most to."""
    rows = mass_splitting.table(list(mass_splitting.measure(2, [3, 5, 9, 25], radii, draws, 1e-3, 0)))
    added = [row["split"] / row["unsplit"] if row["split"] else 1.0 for row in rows]
    return [{"panel": "mass", **row, "added": factor} for row, factor in zip(rows, added, strict=True)]


def _parts(setting: Setting) -> list[Part]:
    every = setting.pick(4, 2, 1)
    text = [f"--text={setting.data / 'tinyshakespeare.txt'}"] if setting.data else []
    sizes = [(round(2 ** (k / 2)), RADIUS) for k in range(2, setting.pick(8, 41, 41), every)]
    radii = [(TOKENS, k / 8) for k in range(2, setting.pick(8, 25, 25), every)]
    tiny = ["--depth=1", "--width=16", "--heads=2", "--sequences=2", "--lengths", "2", "8"]
    small = ["--depth=2", "--sequences=3", "--lengths", "2", "4", "8", "16", "32"]
    options = setting.pick(tiny, small, ["--sequences=3"]) + text
    wide = setting.pick([4.0], [1.0, 2.0, 4.0], [0.5, 1.0, 2.0, 4.0, 8.0])
    found = [
        Part("against n", partial(bounds, "n", sizes)),
        Part("against R", partial(bounds, "R", radii)),
        Part("random BERT type", partial(model_gains, "random-bert", options), 5.0),
        Part("mass", partial(splitting, wide, setting.pick(1, 6, 30)), 2.0),
    ]
    pretrained = Part("pretrained MiniLM", partial(model_gains, "MiniLM", text), 20.0)
    return [*found, pretrained] if setting.level == "full" else found


def _draw(rows: list[Row], figure: Figure) -> None:
    panels = figure.subplots(1, 4)
    for axes, panel, x in zip(panels, ("n", "R"), ("n", "radius"), strict=False):
        for column, label in LABELS.items():
            for _, xs, ys in curves(rows, "panel", x, column, panel=panel):
                axes.semilogy(xs, ys, label=label, markersize=2)
    model = [row["model"] for row in rows if row["panel"] == "model"][-1]
    for layer, xs, ys in curves(rows, "layer", "n", "gain", model=model):
        panels[2].semilogx(xs, ys, label=f"layer {layer}")
    for name, xs, ys in curves(rows, "attention", "tokens", "added", cloud="centred"):
        panels[3].plot(xs, ys, label=name)
    panels[0].set(xscale="log", xlabel=f"tokens n, R = {RADIUS:g}", title="gain", ylim=(0.5, None))
    panels[1].set(xlabel=f"radius R, n = {TOKENS}", title="gain")
    panels[2].set(xlabel="tokens n", title=f"gain, {model}", ylim=(0, None))
    panels[3].set(xlabel="tokens n", title="split / unsplit")
    for axes in (panels[0], *panels[2:]):
        axes.legend(fontsize=6)


def _table(rows: list[Row]) -> list[Row]:
    some = [row for row in rows if row["panel"] in ("n", "R")][::5]
    found = [
        {
            "where": f"n = {row['n']}, R = {row['radius']:.3g}",
            **{v: row.get(k) for k, v in LABELS.items()},
        }
        for row in some
    ]
    layers = {f"{row['model']}, layer {row['layer']}": row for row in rows if row["panel"] == "model"}
    fits = {where: f"{row['exponent']:.3f} ± {row['error']:.3f}" for where, row in layers.items()}
    return [*found, *({"where": where, "exponent of n": fit} for where, fit in fits.items())]


def _judge(rows: list[Row]) -> Finding:
    by_n, by_radius, mass = ([r for r in rows if r["panel"] == p] for p in ("n", "R", "mass"))
    shares = [row["gain"] / row["bound"] for row in by_n + by_radius if "gain" in row]
    shares += [row["measure"] / row["limit"] for row in by_radius]
    shares += [row["share"] for row in rows if row["panel"] == "model"]
    sound = max(shares) <= 1.0 and all(r["bound"] <= min(r["published"], r["limit"]) for r in by_n)
    # The split gain is that of small steps: a finite one may pass it by about its own size.
    sound &= all(row["attack"] <= 1.01 * row["split"] for row in mass if row["split"])

    def slope(most: float) -> float:
        some = [row for row in by_n if row["n"] <= most]
        tokens = [math.log(row["n"] - 1) for row in some]
        return statistics.linear_regression(tokens, [math.log(row["gain"]) for row in some]).slope

    tenth = math.exp(2.0 * RADIUS**2) / 10.0
    real = {row["layer"]: row["exponent"] for row in rows if row.get("model") == "MiniLM"}.values()
    told = f"n^{min(real):.2f} to n^{max(real):.2f} in MiniLM" if real else "not measured in small"
    most, last = max(mass, key=lambda row: row["added"]), by_n[-1]
    return Finding(
        sound,
        f"no gain above a bound (at most {max(shares):.2f} of it); adversarial gains like "
        f"(n-1)^{slope(TOKENS):.2f} to n = {TOKENS}, (n-1)^{slope(tenth):.2f} to {tenth:.0f}; "
        f"text: {told}",
        f"Layer A = -I, W = I, D = 2. At R = {RADIUS:g}, n = {last['n']} `ball_bound` is "
        f"{last['published'] / last['bound']:.3g} times below Theorem 3.3 and "
        f"{last['bound'] / last['limit']:.4f} of `mean_field_bound`, of which two Diracs reach "
        f"{last['measure'] / last['limit']:.2f}. Splitting adds at most {most['added'] - 1:.1%} "
        f"({most['cloud']} clouds, {most['attention']}, n = {most['tokens']}, {most['decides']}). "
        "Published exponents are of BERT and GPT-2, which could not be fetched here, BERT's with "
        "residual and LayerNorm; ours are of attention alone. Random weights look evenly at all tokens. "
        "Adversarial gains grow faster than the root as n nears e^(2R^2), where they level off.",
    )


EXPERIMENT = Experiment(
    name="smoothness",
    title="How smooth is attention?",
    source="Castin, Ablin, Peyré 2024",
    claim="with n tokens in a ball of radius R the gain grows like the root of n, n far below e^(2R^2), "
    "and has a limit; on text trained models grow like n^0.24 to n^0.26.",
    caption="Bounds and gains against n and R; median gains on text; what splitting mass adds.",
    parts=_parts,
    table=_table,
    draw=_draw,
    judge=_judge,
)
