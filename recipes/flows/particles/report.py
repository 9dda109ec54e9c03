"""Scores of models of a system of particles: nats, effective sample size, energies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.flows.particles.data import Samples
from recipes.flows.particles.systems import System
from recipes.output import markdown, show, write_csv, write_json, write_text
from recipes.report import RunReport, count


@dataclass(frozen=True)
class Score:
    """What a model reached.

    Attributes:
        row: of the table.
        energies: of its samples, with their weights, (draws,) each.
    """

    row: dict[str, Any]
    energies: Tensor
    weights: Tensor


def effective_share(log_weights: Tensor) -> float:
    r"""Kish's :math:`(\sum w)^2 / (n \sum w^2)`: the effective part of n weighted samples."""
    normal = log_weights.double().softmax(0)
    return 1.0 / (len(normal) * normal.square().sum().item())


@torch.no_grad()
def score(
    name: str, model: Any, system: System, data: Samples, draws: int, spent: dict[str, float]
) -> Score:
    """Negative log-likelihood on the held-out samples, and samples reweighted by the energy."""
    model.eval()
    nats = -torch.cat([model.log_prob(x) for x in data.held_out.split(1_000)]).double()
    train = -torch.cat([model.log_prob(x) for x in data.train[:5_000].split(1_000)]).double()
    torch.manual_seed(0)
    x = torch.cat([model.sample(len(part)) for part in torch.arange(draws).split(1_000)])
    log_prob = torch.cat([model.log_prob(part) for part in x.split(1_000)]).double()
    energies = system.energy(x.double())
    # A sample of two particles in one place has no finite energy, and no weight.
    log_weights = torch.nan_to_num(-energies - log_prob, nan=-math.inf, neginf=-math.inf)
    row = {
        "model": name,
        "parameters": count(model),
        "updates": int(spent["updates"]),
        "weights of update": int(spent["chosen"]),
        "CPU seconds": round(spent["seconds"]),
        "nats": nats.mean().item(),
        "standard error": nats.std().item() / math.sqrt(len(nats)),
        "nats on training samples": train.mean().item(),
        "effective samples, %": 100.0 * effective_share(log_weights),
    }
    return Score(row, energies, log_weights.softmax(0))


def draw(system: System, data: Samples, scores: list[Score], path: Path) -> None:
    """Histograms of the energies of held-out samples and of each model's, plain and reweighted."""
    from matplotlib.figure import Figure

    truth = system.energy(data.held_out.double())
    low, high = truth.quantile(torch.tensor([0.0, 0.999], dtype=truth.dtype)).tolist()
    bins = torch.linspace(low - 1.0, high + 0.7 * (high - low), 60).tolist()
    figure = Figure(figsize=(3.2 * len(scores), 2.8), layout="constrained")
    for axes, result in zip(figure.subplots(1, len(scores), squeeze=False)[0], scores, strict=True):
        options: dict[str, Any] = {"bins": bins, "density": True}
        axes.hist(truth.tolist(), color="0.8", label="Markov chain", **options)
        kept = result.energies.clamp(max=bins[-1]).tolist()
        axes.hist(kept, histtype="step", color="black", label="model", **options)
        weights = result.weights.tolist()
        options |= {"histtype": "step", "color": "0.4", "linestyle": "--"}
        axes.hist(kept, weights=weights, label="reweighted", **options)
        title = f"{result.row['model']}: {result.row['nats']:.2f} nats"
        axes.set(xlabel="energy, larger ones last", yticks=[], title=title)
    figure.axes[0].set_ylabel("density")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=100)


def write(out: Path, system: System, data: Samples, scores: list[Score]) -> None:
    """All files of a run."""
    rows = [result.row for result in scores]
    show(rows, system.name)
    chain = data.drawn
    checks = {
        "split R-hat": chain.rhat,
        "acceptance": chain.acceptance,
        "energy by halves": chain.halves,
    }
    document = {"system": system.name, "samples": len(data.train), "chain": checks, "models": rows}
    write_json(out / "scores.json", document)
    write_csv(out / "scores.csv", rows)
    draw(system, data, scores, out / "energies.png")
    write_text(
        out / "report.md",
        f"# {system.name}: {system.particles} particles in {system.dim} dimensions\n\n"
        f"    {RunReport.command}\n\n"
        f"{len(data.train)} training samples. Nats are the mean of -log p over {len(data.held_out)} "
        f"held-out samples, a density in the mean-free subspace of {system.freedom} dimensions; less is "
        f"better, and none can be below the entropy, {system.entropy:g}. The chain: split R-hat of the "
        f"energy {chain.rhat:.4f}, mean energy {chain.halves[0]:.3f} in the first and "
        f"{chain.halves[1]:.3f} in the second half, acceptance {chain.acceptance:.2f}.\n\n"
        f"{markdown(rows)}\n\n"
        "`energies.png`: energies of held-out samples and of the models', plain and reweighted.\n",
    )
