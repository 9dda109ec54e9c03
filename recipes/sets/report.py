"""The report of a run: certified accuracy of all points, and an attack on one point of each set."""

from __future__ import annotations

import torch
from jsonargparse.typing import PositiveFloat, PositiveInt
from torch import Tensor, nn

import lipformer as lf
from lipformer.layers import L2MultiheadAttention
from recipes.output import markdown, write_csv
from recipes.pgd import pgd_accuracy
from recipes.report import RunReport, count, draw_accuracy
from recipes.sets.data import NoisySets
from recipes.sets.module import SetModule


class FirstPoint(nn.Module):
    """The logits of each set's first point, (B, N, 4) -> (B, K): points come in no order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """The first of N."""
        return self.model(x)[:, 0]


def heads(module: SetModule) -> str:
    """What the heads have learnt: their temperatures, and the radii that Theorem F takes them at."""
    found = []
    for part in module.modules():
        if isinstance(part, L2MultiheadAttention) and part.log_temperature is not None:
            log_t, log_r = part.log_temperature.detach(), part.log_key_radius
            found += [f"t = {t:.3g}" for t in log_t.exp().tolist()]
            if log_r is not None:
                found += [f"r = {r:.3g}" for r in (log_t / 2 + log_r.detach()).exp().tolist()]
    return "; heads with " + ", ".join(found) if found else ""


class Report(RunReport):
    """After training: certifies all points of the test sets and attacks the first ones.

    Args:
        directory: of the report and of last.ckpt.
        eps: radii of the table; default 0.01, 0.02 and 0.03.
        attacked_sets: attack the first point of so many sets.
        attack_steps: of PGD.
        attack_restarts: of PGD.
        batch_size: sets certified at once.
    """

    def __init__(
        self,
        directory: str = "report/sets",
        eps: list[PositiveFloat] | None = None,
        attacked_sets: PositiveInt = 50,
        attack_steps: PositiveInt = 10,
        attack_restarts: PositiveInt = 2,
        batch_size: PositiveInt = 50,
    ) -> None:
        super().__init__(directory)
        self.eps = sorted(eps or [0.01, 0.02, 0.03])
        self.attacked_sets, self.batch_size = attacked_sets, batch_size
        self.attack = {"steps": attack_steps, "restarts": attack_restarts}

    def write(self, module: SetModule, data: NoisySets, updates: int, seconds: float) -> str:
        """The table, the picture and the text."""
        x, labels = (part.to(module.device) for part in data.test)
        parts = zip(x.split(self.batch_size), labels.split(self.batch_size), strict=True)
        with lf.frozen(module.model):
            radius = torch.cat([module.radii(*part).cpu() for part in parts])
        rows = self.table(module, x[: self.attacked_sets], labels[: self.attacked_sets, 0], radius)
        write_csv(self.directory / "accuracy.csv", rows)
        attacked = {row["eps"]: row["pgd"] for row in rows}
        path = self.directory / "accuracy.png"
        draw_accuracy(radius, attacked, path, "eps, l2 norm of a whole set")
        return self.text(rows, module, data, updates, seconds)

    def table(
        self, module: SetModule, x: Tensor, labels: Tensor, radius: Tensor
    ) -> list[dict[str, float]]:
        """Accuracies in [0, 1] for each eps, first 0: clean accuracy.

        Args:
            module: in eval mode.
            x: sets to attack, (A, N, 4).
            labels: of their first points, (A,).
            radius: of all points of all sets, (S, N); the attacked sets come first.
        """
        rows, first = [], FirstPoint(module.model)
        for eps in (0.0, *self.eps):
            stands = (radius > eps).double()
            attack = self.attack if eps else {"steps": 0, "restarts": 1}
            found = pgd_accuracy(first, x, labels, eps, self.batch_size, box=None, **attack)
            own = stands[: len(x), 0].mean().item()
            rows.append(
                {"eps": eps, "certified": stands.mean().item(), "pgd": found, "attacked_certified": own}
            )
        return rows

    def text(
        self,
        rows: list[dict[str, float]],
        module: SetModule,
        data: NoisySets,
        updates: int,
        seconds: float,
    ) -> str:
        """The report as Markdown."""
        arm = module.hparams["attention"]
        names = {
            "certified": "certified, all points",
            "attacked_certified": "certified, attacked points",
            "pgd": "PGD, attacked points",
        }
        shown = [
            {"eps": f"{row['eps']:g}", **{names[k]: f"{row[k]:.1%}" for k in names}} for row in rows
        ]
        sets = len(data.test[0])
        return (
            f"# Sets of {data.points} points with noisy labels: attention {arm}\n\n"
            f"    {self.command}\n\n"
            f"{data.clusters} clusters, labels flipped with probability {data.flip:g}. "
            f"{count(module):,} parameters, {updates} updates in {seconds:.0f} s; {sets} test sets. "
            f"Certified constant {module.measured_gain():.6g} from a set to the head's input"
            f"{heads(module)}. eps is in the l2 norm of a whole set. PGD changes all of a set "
            f"to turn the answer for its first point, in {min(sets, self.attacked_sets)} sets, by "
            f"{self.attack['steps']} steps from each of {self.attack['restarts']} starts.\n\n"
            f"{markdown(shown)}\n\n"
            "- `accuracy.png`, `accuracy.csv`: the table.\n"
            "- `last.ckpt`: the state at the end; one that an interrupted run leaves is finished by\n"
            "  `fit --ckpt_path` with the same settings. `logs/`: CSV logs and the configuration.\n"
        )
