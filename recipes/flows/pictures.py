"""The pictures of a trained flow on sets of points."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
from matplotlib.axes import Axes
from torch import Tensor

import lipformer as lf
from lipformer.flows import AttentionFlow, InvertibleResidual

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def _frame(axes: Axes, reach: float) -> None:
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), xticks=[], yticks=[], aspect="equal")


def draw_samples(held_out: Tensor, samples: Tensor, path: Path, event: str = "set") -> None:
    """Samples against data: as many points of each together, and five events of each.

    Args:
        held_out: (B, T, 2).
        samples: (n, T, 2).
        path: of the picture.
        event: what T points are, "set" or "sequence".
    """
    shown = min(len(held_out), len(samples))
    reach = 1.1 * held_out.abs().amax().item()
    figure, rows = plt.subplots(2, 6, figsize=(13, 4.6), layout="constrained")
    for row, (name, sets) in zip(
        rows, {"held-out data": held_out, "samples": samples}.items(), strict=True
    ):
        cloud = sets[:shown].flatten(0, 1)
        row[0].plot(cloud[:, 0], cloud[:, 1], ",", color="black", alpha=0.6)
        row[0].set_title(f"{name}: {len(cloud)} points")
        for axes, one in zip(row[1:], sets, strict=False):
            axes.plot(one[:, 0], one[:, 1], "o", markersize=4)
            axes.set_title(f"one {event}")
        for axes in row:
            _frame(axes, reach)
    figure.savefig(path, dpi=110)
    plt.close(figure)


@torch.no_grad()
def next_point_density(
    log_prob: Callable[[Tensor], Tensor], others: Tensor, reach: float, cells: int
) -> Tensor:
    """p(last point | the others) on a grid, (cells, cells), normalised over it.

    Args:
        log_prob: of whole sets (B, T, 2).
        others: (T - 1, 2).
        reach: the grid covers [-reach, reach] in both directions.
        cells: of the grid in each direction.
    """
    line = (torch.arange(cells) + 0.5) / cells * 2.0 * reach - reach
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).reshape(-1, 1, 2)
    sets = torch.cat([others.expand(len(grid), -1, -1), grid.to(others)], 1)
    log_density = torch.cat([log_prob(part) for part in sets.split(256)]).double()
    return log_density.softmax(0).reshape(cells, cells) * (cells / (2.0 * reach)) ** 2


def draw_density(
    log_prob: Callable[[Tensor], Tensor], held_out: Tensor, path: Path, cells: int = 48
) -> None:
    """The exact density of one more point, given the other points of a held-out set, for three sets."""
    reach = 1.1 * held_out.abs().amax().item()
    figure, row = plt.subplots(1, 3, figsize=(10, 3.6), layout="constrained")
    for axes, one in zip(row, held_out, strict=False):
        density = next_point_density(log_prob, one[:-1], reach, cells)
        axes.imshow(density.cpu(), origin="lower", extent=(-reach, reach, -reach, reach), cmap="magma")
        axes.plot(*one[:-1].cpu().T, "o", color="white", markersize=3, label="given")
        axes.plot(*one[-1].cpu(), "x", color="cyan", label="the next point")
        axes.set_title("density of the next point")
        _frame(axes, reach)
    row[0].legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


class Solve(NamedTuple):
    """One inverse: evaluations of the branch, largest error of a coordinate, and its promised bound."""

    evaluations: int
    error: float
    error_bound: float


@torch.no_grad()
def inversion_errors(
    flow: AttentionFlow, x: Tensor, tolerances: tuple[float, ...]
) -> dict[str, list[Solve]]:
    """How far the inverse of the slowest attention block is from the truth after so many evaluations.

    Args:
        flow: a trained flow; a float64 copy of it is used, so that rounding does not hide the rate.
        x: data (B, T, D).
        tolerances: asked of the solver, one solve each.

    Returns:
        One solve for each tolerance, for "plain" and "Anderson".
    """
    flow, x = copy.deepcopy(flow).double().eval(), x.double()
    with lf.frozen(flow):
        attending: list[tuple[int, InvertibleResidual, Tensor]] = []
        for block in flow.blocks:
            y = block(x)
            attends = any(isinstance(part, lf.L2MultiheadAttention) for part in block.modules())
            if isinstance(block, InvertibleResidual) and attends:
                attending.append((block.inverse_with_record(y)[1].iterations, block, x))
            x = y
        _, block, x = max(attending, key=lambda found: found[0])
        curves: dict[str, list[Solve]] = {"plain": [], "Anderson": []}
        for name, tolerance in itertools.product(curves, tolerances):
            block.accelerate = name == "Anderson"
            found, record = block.inverse_with_record(block(x), tol=tolerance)
            error = (found - x).abs().max().item()
            curves[name].append(Solve(record.iterations, error, record.error_bound.max().item()))
    return curves


def draw_inversion(curves: dict[str, list[Solve]], path: Path) -> None:
    """Error of the inverse against evaluations, and above it the bound that each record promises."""
    figure, axes = plt.subplots(figsize=(6.5, 4.4), layout="constrained")
    for colour, (name, solves) in zip(("C0", "C1"), curves.items(), strict=True):
        counts, errors, bounds = zip(*solves, strict=True)
        axes.semilogy(counts, errors, "o-", color=colour, label=f"{name}: error")
        axes.semilogy(counts, bounds, "x:", color=colour, label=f"{name}: promised error_bound")
    axes.set(
        xlabel="evaluations of the branch\n\nAttention: plain steps converge in a few evaluations.\n"
        "Anderson pays on rotation-like maps of few features.",
        ylabel="largest error",
        title="Inverse of the slowest attention block",
    )
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
