"""This project; Newhouse et al. 2025: A language model of constant 2.

a Transformer of constant 2 predicts tiny Shakespeare nearly as well as one without, if its logits are
read at a temperature that fits.

Accuracy on the last tenth of the text; mean and range over seeds. A constant says nothing without the
temperature: models to the right are forced to be smooth, on the left they may be sharp. "invertible" is
divided to constant 2 after training, certified but no smoother than before; "dot_product" has none.
Newhouse et al. report 60% in a looser sense, at GPU size; a 7-gram has 54.8%.
"""

from pathlib import Path
from typing import Any

import torch

import lipformer as lf
from recipes.output import write_text
from recipes.papers.characters import trained
from recipes.papers.experiment import Finding, Panel, Part, Row, Rows, Setting, curves

CONSTANT, GOAL, GAP = 2.0, 0.55, 0.04
READ, SHARE = "temperature of the softmax over a constant of 2", "accuracy (share of characters)"
PANELS = [Panel("temperature", "accuracy", "arm", {}, "x", READ, SHARE)]


@torch.no_grad()
def _certified(run: Any) -> Row:
    """The constant in the token norm, and how far one changed character can move the logits.

    Logits of a larger constant are divided down to it, and the temperature of the softmax with them:
    that changes no probability.
    """
    model, row = run.model.model.eval(), Row()
    bound = lf.certify(model.body, norm="token").bound
    if bound > CONSTANT:
        row["temperature"] = run.model.temperature * CONSTANT / bound
        bound = lf.certify(lf.Contractive(model.body, CONSTANT, norm="token"), norm="token").bound
    x = model.embed(torch.arange(model.config.vocab_size)[None])[0].double()
    return row | {"certificate": bound, "one character": bound * torch.cdist(x, x).max().item()}


def measure(arm: str, temperature: float | None, seed: int, setting: Setting, folder: Path) -> Rows:
    """One run on tiny Shakespeare (without --data on the text of other experiments)."""
    steps, size = setting.pick((2, 2), (60, 16), (2400, 32))
    options: Row = {"trainer.max_steps": steps, "data.batch_size": size}
    if setting.data is not None:
        text = (setting.data / "tinyshakespeare.txt").read_text(encoding="utf-8")
        most = len(text) * 9 // 10
        write_text(folder / "text" / "train.txt", text[:most])
        write_text(folder / "text" / "valid.txt", text[most:])
        options |= {"data.path": folder / "text", "data.characters": "plain"}
    options |= {"model.temperature": temperature} if temperature else {}
    certified = None if arm == "dot_product" else _certified
    found = trained(setting, f"shakespeare/{arm}", seed, options, folder, certified)
    yield {"arm": arm, "temperature": temperature, **found}


def parts(setting: Setting) -> list[Part]:
    arms: dict[str, tuple[str, float | None, int]] = {}
    for s in range(setting.pick(1, 1, 3)):
        arms[f"constant 2 by scaling, seed {s}"] = "invertible", None, s
        arms[f"no constant, seed {s}"] = "dot_product", None, s
    for t in (1 / 16, 1.0)[: setting.pick(1, 2, 2)]:
        arms[f"constant 2 at temperature {t:g}, seed 0"] = "lipschitz", t, 0
    return [Part(name, measure, (*arm, setting)) for name, arm in arms.items()]


def judge(rows: list[Row]) -> Finding:
    by_arm = curves(rows, "arm", "accuracy")[None]
    free, best = by_arm["dot_product"], by_arm["invertible"]
    smooth = curves(rows, "temperature", "accuracy", "arm")["lipschitz"]
    certificate, moved = (max(row.get(k, 0.0) for row in rows) for k in ("certificate", "one character"))
    sharp = min(row["temperature"] or 1.0 for row in rows if row["arm"] == "invertible")
    told = ", ".join(f"{mean:.1%} at {t:g}" for t, mean in smooth.items())
    holds = best.low > GOAL and free - best < GAP and certificate <= CONSTANT
    return Finding(
        holds or (None if rows[0]["steps"] < 1000 else False),
        f"accuracy {best:.1%} ({best.low:.1%} to {best.high:.1%}) with a certified constant of "
        f"{certificate:.3f}, read at temperature {sharp:.2g}; {told} if it is 2 in training; "
        f"{free:.1%} without a constant",
        f"One changed character moves no token's logits by more than {moved:.1f}, where embedded "
        f"characters have a root mean square of 1 per feature ({10 * moved:.0f} if it were 10). "
        f"{rows[0]['steps']} updates in each arm.",
    )
