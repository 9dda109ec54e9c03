"""What a character Transformer of constant 2 predicts, by the temperature of its softmax."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import torch

import lipformer as lf
from lipformer.models import LanguageModel
from recipes.output import write_text
from recipes.papers.characters import trained
from recipes.papers.experiment import Experiment, Finding, Part, Row, Setting, curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONSTANT, GOAL, GAP = 2.0, 0.55, 0.04
TEMPERATURES = (4.0, 1.0, 1 / 4, 1 / 16)
BEST = min(TEMPERATURES)


@torch.no_grad()
def _certified(model: LanguageModel) -> Row:
    """The constant in the token norm, and how far one changed character can move the logits."""
    bound = lf.certify(model.eval(), norm="token").bound
    symbols = model.embed(torch.arange(model.config.vocab_size)[None])[0].double()
    return {"certificate": bound, "one character": bound * torch.cdist(symbols, symbols).max().item()}


def _text(setting: Setting, folder: Path) -> list[str]:
    """Tiny Shakespeare, its last tenth to validate; without --data the text of the other experiments."""
    if setting.data is None:
        return []
    text = (setting.data / "tinyshakespeare.txt").read_text(encoding="utf-8")
    most = len(text) * 9 // 10
    write_text(folder / "text" / "train.txt", text[:most])
    write_text(folder / "text" / "valid.txt", text[most:])
    return ["--data.path", str(folder / "text"), "--data.characters", "plain"]


def measure(temperature: float | None, seed: int, setting: Setting, folder: Path) -> Row:
    """One run: accuracy and nats of the validation text; no temperature: without constraints."""
    options = [*_text(setting, folder), "--data.batch_size", setting.pick("2", "16", "64")]
    if setting.level == "smoke":
        options += ["--model.config.dim", "16", "--data.block", "16", "--trainer.limit_val_batches", "1"]
    name, judge = "dot_product", None
    if temperature is not None:
        name, judge = "lipschitz", _certified
        options += ["--model.temperature", str(temperature)]
    steps, config = setting.pick(2, 60, 1600), f"../../shakespeare/{name}"
    found = trained(folder, setting, config, seed, steps, *options, judge=judge)
    return {"arm": name, "temperature": temperature, **found}


def _parts(setting: Setting) -> list[Part]:
    arms = [(t, s) for s in range(setting.pick(1, 1, 3)) for t in (BEST, None)]
    arms += [(t, 0) for t in setting.pick((), (1.0,), TEMPERATURES[:-1])]
    name = "constant 2 at temperature {0:g}, seed {1}"
    return [
        Part(name.format(t, s) if t else f"no constant, seed {s}", partial(measure, t, s, setting))
        for t, s in arms
    ]


def _draw(rows: list[Row], figure: Figure) -> None:
    axes = figure.subplots()
    told = [row | {"sharpness": CONSTANT / row["temperature"]} for row in rows if row["temperature"]]
    for _, xs, ys in curves(told, "arm", "sharpness", "accuracy"):
        axes.semilogx(xs, [100 * y for y in ys], linestyle="none", label="constant 2")
    free = mean(row["accuracy"] for row in rows if not row["temperature"])
    axes.axhline(100 * free, color="gray", label="dot-product attention, no constant")
    axes.set(xlabel="constant / temperature of the softmax", ylabel="accuracy, %")
    axes.legend()


def _judge(rows: list[Row]) -> Finding:
    found = {
        t: [row["accuracy"] for row in rows if row["temperature"] == t] for t in (*TEMPERATURES, None)
    }
    best, free = mean(found[BEST]), mean(found[None])
    sharp = [row for row in rows if row["temperature"] == BEST]
    others = [f"{mean(found[t]):.1%} at {t:g}" for t in TEMPERATURES[:-1] if found[t]]
    holds = min(found[BEST]) > GOAL and free - best < GAP
    certificate = max(row["certificate"] for row in sharp)
    return Finding(
        (holds and certificate <= CONSTANT) or (None if rows[0]["steps"] < 1000 else False),
        f"accuracy {best:.1%} ({min(found[BEST]):.1%} to {max(found[BEST]):.1%}) with a certified "
        f"constant of {certificate:.3f}, read at temperature {BEST:g}; {free:.1%} without constraints",
        f"At other temperatures: {', '.join(others)}. {rows[0]['steps']} updates in each arm, the last "
        "tenth of the text validates. Embedded characters have a root mean square of 1 per feature: one "
        f"changed character moves no token's logits by more than {sharp[0]['one character']:.1f} (ten "
        "times that if it were 10). Accuracy does not depend on the scale of logits, the loss does: "
        "what a model can learn is set by its constant over the temperature of the softmax, which is "
        "why the curve is over that. Newhouse et al. 2025 report 60% for a constant of 2 in a looser "
        "sense, of a model of GPU size; a 7-gram has 54.8%.",
    )


EXPERIMENT = Experiment(
    name="constants",
    title="A language model of constant 2",
    source="This project; Newhouse et al. 2025",
    claim="a Transformer of constant 2 predicts tiny Shakespeare nearly as well as one without.",
    caption="Accuracy on the validation text, one point for each run.",
    parts=_parts,
    table=lambda rows: [
        {
            "arm": row["arm"],
            "temperature": row["temperature"] or "",
            **{k: row.get(k, "") for k in ("seed", "parameters", "accuracy", "nats", "certificate")},
        }
        for row in rows
    ],
    draw=_draw,
    judge=_judge,
)
