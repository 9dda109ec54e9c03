"""Learns the density of a system of particles and compares models at equal budgets of CPU time.

    python -m recipes.flows.particles --system dw4
    python -m recipes.flows.particles --system lj13 --seconds 900

Data come from a seeded Markov chain, are drawn at the first run and kept in --data. A run that was
broken off, or that --stop ended, goes on when the same command is given again. Leaves report.md,
scores.json, scores.csv, energies.png and the weights of each model in --out, else
report/flows/particles/<system>.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from recipes.cli import run_recipe
from recipes.flows.particles.data import samples
from recipes.flows.particles.fit import fit
from recipes.flows.particles.models import BASELINES, FLOWS, build
from recipes.flows.particles.report import score, write
from recipes.flows.particles.systems import SYSTEMS
from recipes.output import parser, usable_directory

LR = {**dict.fromkeys(FLOWS, 1e-2), "free": 5e-3, "realnvp": 3e-3, "nsf": 1e-2}


def run(arguments: list[str]) -> None:
    """Trains and scores the models that are asked for."""
    options = parser(__doc__)
    options.add_argument("--system", choices=[*SYSTEMS], default="dw4", help="of particles")
    options.add_argument(
        "--models", nargs="+", choices=[*LR], default=["pairs", *BASELINES], help="to fit"
    )
    options.add_argument("--samples", type=int, default=10_000, help="to train on, at most 100000")
    options.add_argument("--seconds", type=float, default=300.0, help="of CPU time for each model")
    options.add_argument(
        "--stop", type=float, default=2400.0, help="seconds of a model after which to end"
    )
    options.add_argument("--lr", type=float, help="the largest; by default one for each model")
    options.add_argument("--batch", type=int, default=256, help="samples of an update")
    options.add_argument("--seed", type=int, default=0, help="of weights, batches and choice of samples")
    options.add_argument("--draws", type=int, default=5_000, help="of each model, to reweight")
    options.add_argument(
        "--data", type=Path, default=Path("data/particles"), help="of the chains' draws"
    )
    options.add_argument("--out", type=Path, help="directory of all output")
    given = options.parse_args(arguments)
    system = SYSTEMS[given.system]
    out = given.out or Path("report/flows/particles") / system.name
    usable_directory(out)
    data = samples(system, given.samples, given.seed, given.data)
    rows = []
    for name in given.models:
        torch.manual_seed(given.seed)
        model = build(name, system, data.train[:1_000])
        print(f"{name}: {given.seconds:g} CPU seconds")
        spent = fit(
            model,
            data.train,
            seconds=given.seconds,
            lr=given.lr or LR[name],
            batch=given.batch,
            turn=name not in ("pairs", "attention"),
            seed=given.seed,
            path=out / f"{name}.pt",
            stop=given.stop,
        )
        if spent["seconds"] < given.seconds:
            print(f"stopped after {spent['seconds']:.0f} s: give the same command to go on")
            return
        rows.append(score(name, model, system, data, given.draws, spent))
    write(out, system, data, rows)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return run_recipe("recipes.flows.particles", run, arguments)


if __name__ == "__main__":
    sys.exit(main())
