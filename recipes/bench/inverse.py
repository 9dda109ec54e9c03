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
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer.flows import InvertibleResidual, Record
from recipes.bench.timing import environment, interleave
from recipes.output import parser, show, write_json


class Counter(nn.Sequential):
    """A branch that counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def branches(dim: int, heads: int, length: int, coeff: float) -> dict[str, InvertibleResidual]:
    """The blocks that are inverted, by name."""

    def attention(causal: bool) -> nn.Module:
        return lf.L2MultiheadAttention(dim, heads, batch_first=True, causal=causal)

    def rotation() -> nn.Module:
        # All of its spectrum on a circle: the hardest case for acceleration.
        linear = nn.Linear(dim, dim, bias=False)
        nn.init.orthogonal_(linear.weight)
        return linear

    return {
        "attention, norm": InvertibleResidual(attention(False), coeff, seq_len=length),
        "attention, causal": InvertibleResidual(attention(True), coeff, "causal", seq_len=length),
        "feed-forward": InvertibleResidual(lf.FeedForward(dim, 2 * dim), coeff),
        "rotation": InvertibleResidual(rotation(), coeff),
    }


def peer_blocks(net: nn.Module, dim: int) -> dict[str, nn.Module]:
    """The blocks of normflows and FrEIA around this branch, as far as they are installed."""
    blocks: dict[str, nn.Module] = {}
    with warnings.catch_warnings():
        # FrEIA's docstrings have invalid escapes, which Python warns of when it compiles them.
        warnings.simplefilter("ignore")
        with suppress(ImportError):
            from normflows.flows import Residual

            blocks["normflows Residual"] = Residual(net, reverse=False).to(next(net.parameters()))
        with suppress(ImportError):
            from FrEIA.modules import IResNetLayer

            layer = blocks["FrEIA IResNetLayer"] = IResNetLayer([(dim,)])
            layer.residual = net
    return blocks


def peer_solvers(net: nn.Module, dim: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """The inverses of the same."""

    def solve(name: str, block: Any, y: Tensor) -> Tensor:
        block.eval()
        return block([y], rev=True, jac=False)[0][0] if "FrEIA" in name else block.iresblock.inverse(y)

    return {name: partial(solve, name, block) for name, block in peer_blocks(net, dim).items()}


@torch.no_grad()
def rows_of(
    name: str, block: InvertibleResidual, x: Tensor, scale: float, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """All solvers on one block, for y = block(x).

    "evaluations" are of the branch, for the slowest sample; "promised" is in units of max|x| too.
    """
    size = x.abs().max().item()
    y = block(x)
    counter = Counter(block.branch)
    solvers: dict[str, Callable[[], Any]] = {}
    found: dict[str, tuple[Tensor, float | None, int]] = {}

    def ours(accelerate: bool, tol: float) -> tuple[Tensor, Record]:
        block.accelerate = accelerate
        return block.inverse_with_record(y, tol=tol)

    with lf.frozen(block.branch):
        for accelerate, tol in itertools.product((True, False), options.tols):
            solver = f"lipformer, {'Anderson' if accelerate else 'plain'}, tol {tol:g}"
            solvers[solver] = partial(ours, accelerate, tol)
            solved, record = ours(accelerate, tol)
            found[solver] = solved, record.error_bound.max().item() / size, record.iterations
        for solver, inverse in peer_solvers(counter, x.shape[-1]).items():
            solvers[solver] = partial(inverse, y)
            counter.calls = 0
            found[solver] = inverse(y), None, counter.calls
        samples = interleave(solvers, seconds=0.0, min_repetitions=1 if options.quick else 5)
    return [
        {
            **{"branch": name, "solver": solver, "coeff": block.coeff, "scale": scale},
            **{"error": (solved - x).abs().max().item() / size, "promised": promised},
            **{"evaluations": count, "milliseconds": 1e3 * samples.median(solver)},
        }
        for solver, (solved, promised, count) in found.items()
    ]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    given = parser(__doc__)
    add = given.add_argument
    add("--out", type=Path, default=Path("report/bench/inverse.json"), help="JSON file")
    add("--quick", action="store_true", help="one repetition of each, not five")
    add("--batch", type=int, default=8, metavar="B", help="events")
    add("--length", type=int, default=64, metavar="T", help="tokens of an event")
    add("--dim", type=int, default=64, metavar="D", help="features of a token")
    add("--heads", type=int, default=4, metavar="H", help="heads of attention")
    add("--coeffs", type=float, nargs="+", default=[0.9], metavar="C", help="rates")
    add("--scales", type=float, nargs="+", default=[1.0, 10.0], metavar="S", help="of the inputs")
    add("--tols", type=float, nargs="+", default=[1e-3, 1e-6], metavar="TOL", help="of our solver")
    add("--threads", type=int, default=2, metavar="N", help="of torch")
    return given.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measures all blocks, coefficients and scales, prints and writes."""
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for coeff in options.coeffs:
        torch.manual_seed(0)
        for name, block in branches(options.dim, options.heads, options.length, coeff).items():
            for scale in options.scales:
                x = scale * torch.randn(options.batch, options.length, options.dim)
                rows += rows_of(name, block.eval(), x, scale, options)
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    facts = environment("normflows", "FrEIA")
    show([{**row, "promised": row["promised"] or "-"} for row in rows])
    write_json(options.out, {"environment": facts, "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
