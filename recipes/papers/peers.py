"""Ours beside other people's layers and tools: each question is put to all of them in one run.

A peer that is not installed is left out and named: pip install 'lipformer[bench,flows]'.
"""

from __future__ import annotations

import copy
import io
import math
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lipformer as lf
from lipformer.estimates.attack import steepest_point
from recipes.bench import inverse
from recipes.bench.peers import OutputOnly, Shape, TorchAttention, variant
from recipes.bench.timing import environment, interleave, training_step
from recipes.papers.experiment import Experiment, Finding, Part, Row, Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Build = Callable[[int], nn.Module]

PEERS = ("x-transformers", "deel-torchlip", "orthogonium", "normflows", "FrEIA")
TIMED = ("mha", "lean", "paper", "cdist", "xt_flash", "xt_dense")
STEEP = ("mha", "xt_dense", "cdist", "lean")
SCALES = ("1", "10", "100", "1000")
BRANCHES = ("attention, norm", "attention, causal", "feed-forward", "rotation")
STAGES = ("training", "eval", "loaded", "weights alone", "averaged")
OURS, DOT, TORCH = variant("lean").label, variant("mha").label, "torch spectral_norm"
GAIN = "gain of attention at input size"
BELOW, ABOVE = "attack, from below", "lipformer certify"
POWER = "product of norms by power iteration"


def _rows(part: str, name: str, found: Mapping[str, Any]) -> list[Row]:
    """A line of the part's table: its name, and values by column."""
    return [{"part": part, "name": name, "column": k, "value": v} for k, v in found.items()]


def versions(folder: Path) -> list[Row]:
    """Of the peers; None of those that are not installed."""
    found = environment(*PEERS)
    return [row for name in PEERS for row in _rows("peer", name, {"version": found[name]})]


def _layers(keys: Sequence[str], shape: Shape) -> Iterator[tuple[str, nn.Module]]:
    """The layers of the benchmark that are installed."""
    for key in keys:
        torch.manual_seed(0)
        with suppress(ImportError):
            yield key, variant(key).build(shape)


def _times(steps: Mapping[str, Callable[[], object]], under: str, seconds: float) -> dict[str, Any]:
    """Processor time of each step in times of one of them."""
    samples = interleave(steps, seconds=seconds, min_repetitions=3, timer=time.process_time)
    ratios = {name: samples.ratio(name, under) for name in steps}
    return {name: ratio and ratio.median for name, ratio in ratios.items()}


def speeds(shape: Shape, tokens: int, seconds: float, folder: Path) -> list[Row]:
    """Forward and backward passes of attention in times of nn.MultiheadAttention."""
    x = torch.randn(tokens // shape.length, shape.length, shape.dim)
    steps = {key: training_step(layer, x) for key, layer in _layers(TIMED, shape)}
    column, found = f"{shape.length} tokens, time", _times(steps, "mha", seconds)
    return [row for key in steps for row in _rows("attention", variant(key).label, {column: found[key]})]


def steepness(scales: Sequence[str], tries: int, folder: Path) -> list[Row]:
    """The largest Jacobian at the steepest points between random inputs of each size."""
    shape, rows = Shape(16, 2, 8), []
    for key, layer in _layers(STEEP, shape):
        layer.double().eval()
        found: dict[str, float] = {}
        for scale in scales:
            draw = torch.Generator().manual_seed(0)
            ends = float(scale) * torch.randn(2, tries, shape.length, shape.dim, generator=draw).double()
            # Dense: torch.cdist, which x-transformers uses too, cannot be differentiated twice.
            dense = [jacobian(layer, x[None]) for x in steepest_point(layer, ends[0], ends[1], "l2")]
            found[scale] = max(_norm(j.reshape(shape.length * shape.dim, -1)) for j in dense)
        if isinstance(layer, OutputOnly):
            found["certificate"] = lf.certify(layer.layer, seq_len=shape.length).bound
        rows += _rows(GAIN, variant(key).label, found)
    return rows


def _norm(matrix: Tensor) -> float:
    return torch.linalg.matrix_norm(matrix.detach().double(), 2).item()


def _peer(module: str, name: str, width: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in docstrings
        found: nn.Module = getattr(import_module(module), name)(width, width, bias=False)
    return found


def _torch(width: int) -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(width, width, bias=False))


def _ours(mode: str, width: int) -> nn.Module:
    return lf.SpectralLinear(width, width, bias=False, mode=mode)


LINEAR: dict[str, Build] = {
    TORCH: _torch,
    "deel-torchlip SpectralLinear": partial(_peer, "deel.torchlip", "SpectralLinear"),
    "orthogonium OrthoLinear": partial(_peer, "orthogonium.layers.linear", "OrthoLinear"),
    **{f"lipformer {mode}": partial(_ours, mode) for mode in ("cap", "normalize", "orthogonal")},
}


def _trained(build: Build, width: int, updates: int, seed: int) -> tuple[nn.Module, nn.Module]:
    """A layer after some updates by Adam towards a map of large norm, and the average of its states."""
    torch.manual_seed(seed)
    layer, target = build(width), torch.randn(width, width)
    average = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.Adam([p for p in layer.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(updates):
        x = torch.randn(64, width)
        optimizer.zero_grad()
        (layer(x) - x @ target).square().mean().backward()
        optimizer.step()
        average.update_parameters(layer)
    return layer, average.module


@torch.no_grad()
def _stages(build: Build, layer: nn.Module, average: nn.Module, width: int) -> dict[str, Tensor]:
    """What a layer multiplies by in its next update, and in eval mode where it is or goes to."""
    fresh, alone = build(width), build(width)
    fresh.load_state_dict(layer.state_dict())
    raw = "parametrizations.weight.original"
    alone.load_state_dict({raw: layer.state_dict()[raw]}, strict=False)
    trains = copy.deepcopy(layer)
    lives = (trains, copy.deepcopy(layer).eval(), fresh.eval(), alone.eval(), average.eval())
    # Read from what it gives for the unit vectors, which is exact.
    return {stage: life(torch.eye(width)) for stage, life in zip(STAGES, lives, strict=True)}


def norms(width: int, updates: int, seeds: int, seconds: float, folder: Path) -> list[Row]:
    """True spectral norms of layers that promise 1, the largest of some seeds, and a step's time."""
    rows, steps = [], {}
    for name, build in LINEAR.items():
        with suppress(ImportError):
            trained = [_trained(build, width, updates, seed) for seed in range(seeds)]
            found = [_stages(build, *pair, width) for pair in trained]
            row = {stage: max(_norm(one[stage]) for one in found) for stage in STAGES}
            for stage in ("eval", "weights alone"):
                row[f"{stage} moved"] = max(_norm(one[stage] - one["training"]) for one in found)
            rows += _rows("linear layer", name, row)
            steps[name] = partial(_step, trained[0][0], torch.randn(64, width))
    costs = _times(steps, TORCH, seconds)
    return rows + [row for name in steps for row in _rows("linear layer", name, {"time": costs[name]})]


def _step(layer: nn.Module, x: Tensor) -> None:
    layer(x).sum().backward()


def inverses(batch: int, length: int, dim: int, folder: Path) -> list[Row]:
    """Errors and evaluations of inverses of the same blocks, and how much of ours was promised."""
    torch.manual_seed(0)
    x, options = torch.randn(batch, length, dim), Namespace(tols=[1e-6], quick=True)
    solvers: dict[str, dict[str, float]] = {}
    for name, block in inverse.branches(dim, 2, length, 0.9).items():
        for row in inverse.rows_of(name, block.eval(), x, 1.0, options):
            found = solvers.setdefault(row["solver"], dict.fromkeys(BRANCHES, 0.0))
            found[name] = row["error"]
            found["evaluations"] = max(row["evaluations"], found.get("evaluations", 0))
            if row["promised"]:
                used = row["error"] / row["promised"]
                found["of its promise"] = max(used, found.get("of its promise", 0.0))
    return [row for solver, found in solvers.items() for row in _rows("inverse", solver, found)]


@sdpa_kernel(SDPBackend.MATH)  # the peers need second derivatives of the kernel
def log_dets(draws: int, folder: Path) -> list[Row]:
    """Log-determinants of one block of attention, and gradients of a weighted sum over its samples.

    Each tool as it comes, in eval and in training mode, against the dense Jacobian in float64. Errors
    of values are of single draws (root mean square), those of gradients of the mean of all draws.
    """
    torch.manual_seed(0)
    length = dim = samples = 4
    block = inverse.branches(dim, 2, length, 0.9)["attention, norm"].double()
    x, weights = torch.randn(samples, length, dim).double(), torch.linspace(0.2, 2.0, samples).double()
    blocks: dict[str, Any] = {"lipformer": block, **inverse.peer_blocks(block.branch, dim)}

    def log_det(name: str) -> Tensor:
        if name == "lipformer":
            return block.forward_and_log_det(x)[1]
        given = x.clone()  # both switch its gradient on
        return blocks[name]([given] if "FrEIA" in name else given)[1]

    def gradient(value: Tensor) -> Tensor:
        wanted = list(block.branch.parameters())
        if not value.requires_grad:
            return torch.zeros(sum(p.numel() for p in wanted)).double()
        found = torch.autograd.grad(weights @ value, wanted, allow_unused=True, materialize_grads=True)
        return torch.cat([g.flatten() for g in found])

    dense = [jacobian(lambda z: block(z[None])[0], one, create_graph=True) for one in x]
    exact = torch.linalg.slogdet(torch.stack(dense).reshape(samples, length * dim, -1))[1]
    slope, rows = gradient(exact), []
    for name, module in blocks.items():
        for mode in ("eval", "training"):
            module.train(mode == "training")
            values = [log_det(name) for _ in range(draws)]
            off = (torch.stack(values) - exact).square().mean().sqrt().item()
            mean = torch.stack([gradient(value) for value in values]).mean(0)
            error = ((mean - slope).norm() / slope.norm()).item()
            rows += _rows("log-determinant", name, {f"{mode}, nats": off, f"{mode}, gradient": error})
    return rows


def _models(dim: int, length: int) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Models and shapes of their samples; the paper's form of L2 attention with orthogonal weights."""

    def mlp(*widths: int) -> nn.Sequential:
        return nn.Sequential(
            *[m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())][:-1]
        )

    def block(attention: nn.Module) -> nn.Sequential:
        return nn.Sequential(lf.Residual(attention), lf.Residual(mlp(dim, 2 * dim, dim)))

    torch.manual_seed(0)
    attention = lf.L2MultiheadAttention(dim, 2, batch_first=True, value_proj=True)
    for name in attention.projections:
        nn.init.orthogonal_(attention.get_parameter(f"{name}.weight"))
    return {
        "linear map": (nn.Linear(8 * dim, 8 * dim), (8 * dim,)),
        "MLP": (mlp(dim, 4 * dim, 4 * dim, dim), (dim,)),
        "L2 block": (block(attention), (length, dim)),
        "dot-product block": (block(TorchAttention(Shape(dim, 2, length))), (length, dim)),
    }


def _power(matrix: Tensor) -> float:
    """The spectral norm by ten steps of power iteration from a random start: from below."""
    v = torch.randn(matrix.shape[1], dtype=matrix.dtype, generator=torch.Generator().manual_seed(0))
    for _ in range(10):
        v = matrix.mT @ (matrix @ v)
        v /= v.norm()
    return (matrix @ v).norm().item()


def _product(model: nn.Module, norm: Callable[[Tensor], float]) -> float:
    """The product of the norms of all matrices, 1 + that of its branch for a residual."""
    total = 1.0
    for part in model if isinstance(model, nn.Sequential) else [model]:
        found = math.prod(norm(p.detach()) for p in part.parameters() if p.ndim == 2)
        total *= 1.0 + found if isinstance(part, lf.Residual) else found
    return total


def _published(layer: Any, length: int) -> float:
    """The l2 bound of Kim et al. 2021 for L2 attention in their form (docs/theory, Published bounds)."""
    q, v = (w.weight.chunk(layer.num_heads) for w in (layer.q_proj, layer.v_proj))
    heads = math.sqrt(sum(_norm(a) ** 4 * _norm(b) ** 2 for a, b in zip(q, v, strict=True)))
    gain = lf.functional.l2_gain(length, theorem="kim2021") / math.sqrt(layer.head_dim)
    return gain * heads * _norm(layer.out_proj.weight)


@sdpa_kernel(SDPBackend.MATH)  # which has second derivatives, and of batches
def certificates(length: int, steps: int, folder: Path) -> list[Row]:
    """What each tool answers for each model, beside an attack; None where it refuses."""
    rows = []
    for name, (model, shape) in _models(16, length).items():
        model.double().eval()
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(4, *shape, generator=draw).double()
        attack = lf.attack_lipschitz(model, x[:1], steps=steps, restarts=8, generator=draw)
        told: dict[str, float | None] = {BELOW: attack.value}
        with suppress(ImportError), redirect_stdout(io.StringIO()):
            from deel.torchlip.utils.evaluate_lip_const import evaluate_lip_const

            told["deel-torchlip evaluate_lip_const"] = evaluate_lip_const(model, x)
        told[POWER] = _product(model, _power)
        if name == "L2 block" and isinstance(model, nn.Sequential):
            attention = model[0].get_submodule("branch")
            told["Kim et al. 2021"] = (1.0 + _published(attention, length)) * _product(model[1:], _norm)
        told[ABOVE] = None
        with suppress(lf.NotCertifiable):
            told[ABOVE] = lf.certify(model, seq_len=length if len(shape) > 1 else None).bound
        rows += [row for tool, value in told.items() for row in _rows("tool", tool, {name: value})]
    return rows


def _parts(setting: Setting) -> list[Part]:
    tokens, dim, seconds = setting.pick((32, 16, 0.0), (1024, 256, 10.0), (4096, 512, 40.0))
    timed = [
        Part(
            f"speed at {n} tokens", partial(speeds, Shape(dim, 2 if dim < 64 else 8, n), tokens, seconds)
        )
        for n in setting.pick([16], [256], [256, 1024])
    ]
    steep = setting.pick((SCALES[:2], 1), (SCALES, 8), (SCALES, 32))
    trained = setting.pick((8, 2, 1, 0.0), (128, 50, 2, 5.0), (256, 50, 4, 20.0))
    return [
        Part("versions", versions, 0.1),
        *timed,
        Part("steepness", partial(steepness, *steep)),
        Part("norms", partial(norms, *trained)),
        Part("inverses", partial(inverses, *setting.pick((2, 4, 4), (4, 32, 32), (8, 64, 64)))),
        Part("log-determinants", partial(log_dets, setting.pick(2, 30, 200))),
        Part("certificates", partial(certificates, *setting.pick((4, 2), (32, 20), (64, 60)))),
    ]


def _table(rows: list[Row]) -> list[Row]:
    lines: dict[tuple[str, str], Row] = {}
    for row in rows:
        line = lines.setdefault((row["part"], row["name"]), {row["part"]: row["name"]})
        value = row["value"]
        line[row["column"]] = f"{value:.4g}" if isinstance(value, float) else str(value or "none")
    return list(lines.values())


def _draw(rows: list[Row], figure: Figure) -> None:
    panels = figure.subplots(1, 3)
    shown = {GAIN: SCALES, "linear layer": STAGES, "inverse": BRANCHES}
    for axes, (part, columns) in zip(panels, shown.items(), strict=True):
        for name in dict.fromkeys(row["name"] for row in rows if row["part"] == part):
            line = [r for r in rows if (r["part"], r["name"]) == (part, name) and r["column"] in columns]
            axes.semilogy([r["column"] for r in line], [r["value"] for r in line], label=name)
        axes.legend(fontsize=6, loc="lower center", bbox_to_anchor=(0.45, 1.0))
        axes.tick_params(axis="x", rotation=0 if part == GAIN else 90, labelsize=7)
    panels[0].set(xlabel="size of the input", ylabel="largest gain found")
    panels[1].set(ylabel="spectral norm (promised: 1)")
    panels[2].set(ylabel="error of the inverse / largest entry")


def _judge(rows: list[Row]) -> Finding:
    value = {(row["part"], row["name"], row["column"]): row["value"] for row in rows}

    def largest(part: str, name: str, columns: Iterable[str]) -> float:
        """Of the lines whose name begins so."""
        chosen = [(n, c) for p, n, c in value if p == part and n.startswith(name) and c in columns]
        return max(value[part, n, c] for n, c in chosen)

    norm, bound = largest("linear layer", "lipformer", STAGES), value[GAIN, OURS, "certificate"]
    gain, det = largest(GAIN, OURS, SCALES), "log-determinant"
    models = [m for p, tool, m in value if p == "tool" and tool == ABOVE and value[p, tool, m]]
    holds = (
        norm <= 1.0 + 1e-12
        and gain <= bound
        and largest("inverse", "lipformer", ["of its promise"]) <= 1.0
        and largest(det, "lipformer", ["eval, nats", "eval, gradient"]) < 1e-9
        and all(value["tool", BELOW, m] <= value["tool", ABOVE, m] * (1.0 + 1e-9) for m in models)
    )
    takes = [
        f"{v:.2f} at {c.removesuffix(', time')}"
        for (p, n, c), v in value.items()
        if p == "attention" and n == OURS
    ]
    solvers = dict.fromkeys(n.replace(",", "").split()[0] for p, n, _ in value if p == "inverse")
    errors = [f"{name} {largest('inverse', name, BRANCHES):.1e}" for name in solvers]
    missing = [n for p, n, _ in value if p == "peer" and value[p, n, "version"] is None]
    return Finding(
        holds,
        f"norm at most {norm:.4f} (torch {largest('linear layer', TORCH, STAGES):.3g}); gain {gain:.3g} "
        f"(certified {bound:.3g}, dot-product {largest(GAIN, DOT, SCALES):.2g}); largest error of an "
        f"inverse: {', '.join(errors)}",
        "Times are processor time of forward and backward, in that of nn.MultiheadAttention and of "
        f"torch's spectral_norm: ours {', '.join(takes)}, and for a linear layer "
        f"{value['linear layer', 'lipformer cap', 'time']:.1f}, which is the price of a norm that is "
        "bounded anew in each pass. Norms are those of what a layer multiplies by after updates of Adam "
        "at 1e-2: in training, in eval mode, in a new layer that was given the whole state or the "
        "weights alone, in an average of states ('moved': norm of the difference from training). "
        "Log-determinants: error of one draw, and of the mean gradient of a weighted sum over samples, "
        "relative (1: there is none); in training ours are noisy, too. Tools: power iteration gives "
        f"{value['tool', POWER, 'linear map']:.4g} for a linear map of norm "
        f"{value['tool', BELOW, 'linear map']:.4g} and sees no softmax; deel-torchlip evaluates at "
        "given inputs, from below; for dot-product attention there is no bound."
        + (f" Not installed and left out: {', '.join(missing)}." if missing else ""),
    )


EXPERIMENT = Experiment(
    name="peers",
    title="Beside other people's layers and tools",
    source="This project",
    claim="norms, inverses, log-determinants and certificates are what they are said to be.",
    caption="Left: attention. Middle: linear layers that promise a norm of 1. Right: inverses of "
    "residual blocks of coefficient 0.9, in float32.",
    parts=_parts,
    table=_table,
    draw=_draw,
    judge=_judge,
)
