"""The inverse of a residual block: error, evaluations and time beside normflows and FrEIA.

    python -m recipes.bench.inverse [--out FILE.json] [--quick]

Every solver gets the very same branch f and the same y = x + f(x) and looks for x: ours (Anderson and
plain iteration, at several tolerances), the one of normflows' Residual (at its tolerance, 1e-5 on
squared steps) and the one of FrEIA's IResNetLayer (its 50 iterations). Normalised weights are frozen for
all of them. The error is the largest of a coordinate, relative to the largest of x; what ours promises
is a bound of the whole event's error in the norm of the contraction, rounding allowed for.

It takes a few minutes on two CPU cores, with --quick about half a minute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.flows import InvertibleResidual
from recipes.bench.attention import environment, version

_RESULTS = Path("report/bench/inverse.json")


@dataclass(frozen=True)
class Row:
    """One solver on one branch.

    Attributes:
        branch: what is inverted.
        solver: by whom.
        coeff: the contraction of the branch.
        scale: of the input.
        error: largest |found - x| / max|x|.
        promised: the error that the solver itself promises, in units of max|x|, if it promises one.
        evaluations: of the branch, for the slowest sample.
        milliseconds: the median of a whole inverse.
    """

    branch: str
    solver: str
    coeff: float
    scale: float
    error: float
    promised: float | None
    evaluations: int
    milliseconds: float


class Counter(nn.Module):
    """A branch that counts its calls."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.branch(x)


def rotation(dim: int) -> nn.Module:
    """A random rotation: all of its spectrum on a circle, the hardest case for acceleration."""
    linear = nn.Linear(dim, dim, bias=False)
    nn.init.orthogonal_(linear.weight)
    return linear


def branches(dim: int, heads: int, length: int, coeff: float) -> dict[str, InvertibleResidual]:
    """The blocks that are inverted, by name."""

    def attention(causal: bool) -> nn.Module:
        return lf.L2MultiheadAttention(dim, heads, batch_first=True, causal=causal)

    return {
        "attention, norm": InvertibleResidual(attention(False), coeff, seq_len=length),
        "attention, causal": InvertibleResidual(attention(True), coeff, "causal", seq_len=length),
        "feed-forward": InvertibleResidual(lf.FeedForward(dim, 2 * dim), coeff),
        "rotation": InvertibleResidual(rotation(dim), coeff),
    }


def timed(run: Callable[[], Any], repeats: int) -> float:
    """The median time of a call in milliseconds."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def peer_solvers(net: nn.Module, dim: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """The inverses of normflows and FrEIA around this branch; those that are installed."""
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    with warnings.catch_warnings():
        # FrEIA's docstrings have invalid escapes, which Python warns of when it compiles them.
        warnings.simplefilter("ignore")
        try:
            from normflows.flows import Residual

            residual = Residual(net, reverse=False).eval()
            found["normflows Residual"] = lambda y: residual.iresblock.inverse(y)
        except ImportError as error:
            print(f"normflows is not installed ({error}): pip install 'lipformer[flows]'")
        try:
            from FrEIA.modules import IResNetLayer

            layer = IResNetLayer([(dim,)])
            layer.residual = net
            found["FrEIA IResNetLayer"] = lambda y: layer([y], rev=True, jac=False)[0][0]
        except ImportError as error:
            print(f"FrEIA is not installed ({error}): pip install 'lipformer[flows]'")
    return found


@torch.no_grad()
def rows_of(
    name: str,
    block: InvertibleResidual,
    x: Tensor,
    scale: float,
    tols: list[float],
    repeats: int,
) -> list[Row]:
    """All solvers on one block, for y = block(x)."""
    rows = []
    size = x.abs().max().item()
    y = block(x)

    def row(solver: str, found: Tensor, promised: float | None, count: int, ms: float) -> Row:
        error = (found - x).abs().max().item() / size
        return Row(name, solver, block.coeff, scale, error, promised, count, ms)

    with lf.frozen(block.branch):
        for accelerate, tol in itertools.product((True, False), tols):
            block.accelerate = accelerate
            found, record = block.inverse_with_record(y, tol=tol)
            milliseconds = timed(lambda tol=tol: block.inverse(y, tol=tol), repeats)  # type: ignore[misc]
            promised = record.error_bound.max().item() / size
            solver = f"lipformer, {'Anderson' if accelerate else 'plain'}, tol {tol:g}"
            rows.append(row(solver, found, promised, record.iterations, milliseconds))
        counter = Counter(block.branch)
        for solver, inverse in peer_solvers(counter, x.shape[-1]).items():
            counter.calls = 0
            found = inverse(y)
            count = counter.calls
            milliseconds = timed(lambda inverse=inverse: inverse(y), repeats)  # type: ignore[misc]
            rows.append(row(solver, found, None, count, milliseconds))
    return rows


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the description as it is written."""


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.inverse", description=__doc__)
    parser.formatter_class = _Help
    parser.add_argument("--out", type=Path, default=_RESULTS, help="JSON file")
    parser.add_argument("--quick", action="store_true", help="one repetition of each, not five")
    parser.add_argument("--batch", type=int, default=8, metavar="B", help="events")
    parser.add_argument("--length", type=int, default=64, metavar="T", help="tokens of an event")
    parser.add_argument("--dim", type=int, default=64, metavar="D", help="features of a token")
    parser.add_argument("--heads", type=int, default=4, metavar="H", help="heads of attention")
    parser.add_argument("--coeffs", type=float, nargs="+", default=[0.9], metavar="C", help="rates")
    parser.add_argument(
        "--scales", type=float, nargs="+", default=[1.0, 10.0], metavar="S", help="of the inputs"
    )
    parser.add_argument(
        "--tols", type=float, nargs="+", default=[1e-3, 1e-6], metavar="TOL", help="tolerances of ours"
    )
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of torch")
    options = parser.parse_args(argv)
    if options.dim % options.heads:
        parser.error(f"--dim must be a multiple of --heads, got {options.dim} and {options.heads}")
    for coeff in options.coeffs:
        if not 0.0 < coeff < 1.0:
            parser.error(f"each of --coeffs must lie between 0 and 1, got {coeff}")
    return options


def measure(options: argparse.Namespace) -> list[Row]:
    """All blocks, coefficients and scales."""
    rows = []
    for coeff in options.coeffs:
        torch.manual_seed(0)
        for name, block in branches(options.dim, options.heads, options.length, coeff).items():
            for scale in options.scales:
                x = scale * torch.randn(options.batch, options.length, options.dim)
                repeats = 1 if options.quick else 5
                rows += rows_of(name, block.eval(), x, scale, options.tols, repeats)
    return rows


def show(rows: list[Row]) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("branch", "c", "scale", "solver", "error", "promised", "evaluations", "ms", box=None)
    for row in rows:
        table.add_row(
            row.branch,
            f"{row.coeff:g}",
            f"{row.scale:g}",
            row.solver,
            f"{row.error:.1e}",
            "-" if row.promised is None else f"{row.promised:.1e}",
            str(row.evaluations),
            f"{row.milliseconds:.1f}",
        )
    console = Console()
    # A pipe has no width of its own, and a narrow table would cut the figures.
    (console if console.is_terminal else Console(width=120)).print(table)


def main(argv: list[str] | None = None) -> None:
    """Measures, prints and writes."""
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    rows = measure(options)
    facts = environment()
    facts |= {package: version(package) for package in ("normflows", "FrEIA")}
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    document = {"environment": facts, "settings": settings, "rows": [asdict(row) for row in rows]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=2) + "\n")
    show(rows)
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
