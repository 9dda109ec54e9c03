"""This project: Beside other people's layers and tools.

norms, inverses, log-determinants and certificates are what they are said to be.

Left: attention at inputs of rising size. Middle: linear layers that promise a norm of 1. Right: inverses
of residual blocks of coefficient 0.9, in float32.
"""

import copy
import io
import time
import warnings
from argparse import Namespace
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lipformer as lf
from lipformer.estimates.attack import steepest_point
from recipes.bench import inverse
from recipes.bench.peers import Shape, TorchAttention, variant
from recipes.bench.timing import environment, interleave, training_step
from recipes.papers.experiment import Finding, Panel, Part, Row, Rows, Setting, pivot

PEERS = ("x-transformers", "deel-torchlip", "orthogonium", "normflows", "FrEIA")
SCALES, STAGES = ("1", "10", "100", "1000"), ("training", "eval", "loaded", "weights alone", "averaged")
BRANCHES = ("attention, norm", "attention, causal", "feed-forward", "rotation")
OURS, DOT, TORCH = variant("lean").label, variant("mha").label, "torch spectral_norm"
GAIN, LINEAR, DET = "gain of attention at input size", "linear layer", "log-determinant"
ATTACK, CERTIFY = "attack, from below", "lipformer certify"
LINEARS = [TORCH, "deel-torchlip SpectralLinear", "orthogonium OrthoLinear"]
LINEARS += ["lipformer cap", "lipformer normalize", "lipformer orthogonal"]
SHOWN = {GAIN: (SCALES, "largest gain"), LINEAR: (STAGES, "spectral norm")}
SHOWN |= {"inverse": (BRANCHES, "error / largest entry")}
PANELS = [
    Panel("column", "value", "name", {"part": part, "column": columns}, "y", part, label)
    for part, (columns, label) in SHOWN.items()
]


def _line(part: str, name: str, found: Mapping[str, Any]) -> list[Row]:
    """A line of the part's table: its name, and values by column."""
    return [{"part": part, "name": name, "column": k, "value": v} for k, v in found.items()]


def versions(folder: Path) -> Rows:
    """Of the peers; None of those that are not installed: pip install 'lipformer[bench,flows]'."""
    found = environment(*PEERS)
    return [row for name in PEERS for row in _line("peer", name, {"version": found[name]})]


def _layers(shape: Shape, *keys: str) -> dict[str, nn.Module]:
    """The layers of the benchmark that are installed, by label."""
    found = {}
    for key in keys:
        torch.manual_seed(0)
        with suppress(ImportError):
            found[variant(key).label] = variant(key).build(shape)
    return found


def _times(part: str, column: str, steps: Mapping[str, Any], under: str, seconds: float) -> list[Row]:
    """Processor time of each step in times of one of them."""
    samples = interleave(steps, seconds=seconds, min_repetitions=3, timer=time.process_time)
    ratios = {name: samples.ratio(name, under) for name in steps}
    return [row for name, r in ratios.items() for row in _line(part, name, {column: r and r.median})]


def speeds(shape: Shape, tokens: int, seconds: float, folder: Path) -> Rows:
    """Forward and backward passes of attention in times of nn.MultiheadAttention."""
    x = torch.randn(tokens // shape.length, shape.length, shape.dim)
    layers = _layers(shape, "mha", "lean", "paper", "cdist", "xt_flash", "xt_dense")
    steps = {name: training_step(layer, x) for name, layer in layers.items()}
    return _times("attention", f"{shape.length} tokens, time", steps, DOT, seconds)


def _norm(matrix: Tensor) -> float:
    return torch.linalg.matrix_norm(matrix.detach().double(), 2).item()


def steepness(scales: tuple[str, ...], tries: int, folder: Path) -> Rows:
    """The largest Jacobian at the steepest points between random inputs of each size."""
    shape = Shape(16, 2, 8)
    for name, layer in _layers(shape, "mha", "xt_dense", "cdist", "lean").items():
        layer.double().eval()
        found: dict[str, float] = {}
        for scale in scales:
            draw = torch.Generator().manual_seed(0)
            ends = float(scale) * torch.randn(2, tries, shape.length, shape.dim, generator=draw).double()
            # Dense: torch.cdist, which x-transformers uses too, cannot be differentiated twice.
            dense = [jacobian(layer, x[None]) for x in steepest_point(layer, ends[0], ends[1], "l2")]
            found[scale] = max(_norm(j.reshape(shape.length * shape.dim, -1)) for j in dense)
        if name == OURS:
            found["certificate"] = lf.certify(layer.get_submodule("layer"), seq_len=shape.length).bound
        yield from _line(GAIN, name, found)


def _peer(module: str, name: str) -> Any:
    """Of a package that may be missing: then it raises ImportError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in docstrings
        return getattr(import_module(module), name)


def _linear(name: str, width: int) -> nn.Module:
    """A square layer that promises a norm of 1."""
    if name == TORCH:
        return nn.utils.parametrizations.spectral_norm(nn.Linear(width, width, bias=False))
    if name.startswith("lipformer"):
        return lf.SpectralLinear(width, width, bias=False, mode=name.split()[1])
    module = "deel.torchlip" if "deel" in name else "orthogonium.layers.linear"
    layer: nn.Module = _peer(module, name.split()[1])(width, width, bias=False)
    return layer


def _trained(name: str, width: int, updates: int, seed: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A layer after updates by Adam towards a map of large norm, and what it is then at each stage.

    Read from the unit vectors, which is exact; all but the first are in eval mode.
    """
    torch.manual_seed(seed)
    layer, target = _linear(name, width), torch.randn(width, width)
    average = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.Adam([p for p in layer.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(updates):
        x = torch.randn(64, width)
        optimizer.zero_grad()
        (layer(x) - x @ target).square().mean().backward()
        optimizer.step()
        average.update_parameters(layer)
    loaded, alone, raw = _linear(name, width), _linear(name, width), "parametrizations.weight.original"
    loaded.load_state_dict(layer.state_dict())
    alone.load_state_dict({raw: layer.state_dict()[raw]}, strict=False)
    lives = (copy.deepcopy(layer).eval(), loaded.eval(), alone.eval(), average.module.eval())
    used = zip(STAGES, (copy.deepcopy(layer), *lives), strict=True)
    with torch.no_grad():
        return layer, {stage: m(torch.eye(width)) for stage, m in used}


def norms(width: int, updates: int, seeds: int, seconds: float, folder: Path) -> Rows:
    """True spectral norms of layers that promise 1, the largest of some seeds, and a step's time."""
    steps, x = {}, torch.randn(64, width)
    for name in LINEARS:
        with suppress(ImportError):
            layers, found = zip(*(_trained(name, width, updates, s) for s in range(seeds)), strict=True)
            steps[name] = lambda layer=layers[0]: layer(x).sum().backward()
            row = {stage: max(_norm(one[stage]) for one in found) for stage in STAGES}
            for stage in ("eval", "weights alone"):
                row[f"{stage} moved"] = max(_norm(one[stage] - one["training"]) for one in found)
            yield from _line(LINEAR, name, row)
    yield from _times(LINEAR, "time", steps, TORCH, seconds)


def inverses(batch: int, length: int, dim: int, folder: Path) -> Rows:
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
    return [row for solver, found in solvers.items() for row in _line("inverse", solver, found)]


@sdpa_kernel(SDPBackend.MATH)  # the peers need second derivatives of the kernel
def log_dets(draws: int, folder: Path) -> Rows:
    """Errors of a block's log-determinants (root mean square of single draws), each tool as it comes.

    Against the dense Jacobian in float64, in eval and in training mode.
    """
    torch.manual_seed(0)
    size, rows = 4, []  # of samples, tokens and features
    block = inverse.branches(size, 2, size, 0.9)["attention, norm"].double()
    x = torch.randn(size, size, size).double()
    dense = torch.stack([jacobian(lambda z: block(z[None])[0], one) for one in x])
    exact = torch.linalg.slogdet(dense.reshape(size, size * size, -1))[1]
    tools: dict[str, Any] = {"lipformer": block, **inverse.peer_blocks(block.branch, size)}
    for name, tool in tools.items():
        told = block.forward_and_log_det if tool is block else tool
        for mode in ("eval", "training"):
            tool.train(mode == "training")
            given = [x.clone() for _ in range(draws)]  # the peers switch its gradient on
            found = [told([z] if "FrEIA" in name else z)[1].detach() for z in given]
            error = (torch.stack(found) - exact).square().mean().sqrt().item()
            rows += _line(DET, name, {f"{mode}, nats": error})
    return rows


@sdpa_kernel(SDPBackend.MATH)  # which has second derivatives, and of batches
def certificates(length: int, steps: int, folder: Path) -> Rows:
    """What each tool answers for each model, beside an attack; None where it refuses."""
    torch.manual_seed(0)
    x, rows = torch.randn(4, length, 16).double(), []
    models: dict[str, nn.Module] = {
        "MLP": nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)),
        "L2 block": lf.Residual(lf.L2MultiheadAttention(16, 2, batch_first=True)),
        "dot-product block": lf.Residual(TorchAttention(Shape(16, 2, length))),
    }
    for name, model in models.items():
        attack = lf.attack_lipschitz(model.double().eval(), x[:1], steps=steps, restarts=8)
        told: dict[str, float | None] = {ATTACK: attack.value, CERTIFY: None}
        with suppress(lf.NotCertifiable):
            told[CERTIFY] = lf.certify(model, seq_len=length).bound
        with suppress(ImportError), redirect_stdout(io.StringIO()):
            evaluate = _peer("deel.torchlip.utils.evaluate_lip_const", "evaluate_lip_const")
            told["deel-torchlip evaluate_lip_const"] = evaluate(model, x)
        rows += [row for tool, value in told.items() for row in _line("tool", tool, {name: value})]
    return rows


def parts(setting: Setting) -> list[Part]:
    tokens, dim, seconds = setting.pick((32, 16, 0.0), (1024, 256, 10.0), (4096, 512, 40.0))
    shapes = [Shape(dim, 2 if dim < 64 else 8, n) for n in setting.pick([16], [256], [256, 1024])]
    trained = setting.pick((8, 2, 1, 0.0), (128, 50, 2, 5.0), (256, 50, 4, 20.0))
    return [
        Part("versions", versions, (), 0.1),
        *(Part(f"speed at {s.length} tokens", speeds, (s, tokens, seconds)) for s in shapes),
        Part("steepness", steepness, setting.pick((SCALES[:2], 1), (SCALES, 8), (SCALES, 32))),
        Part("norms", norms, trained),
        Part("inverses", inverses, setting.pick((2, 4, 4), (4, 32, 32), (8, 64, 64))),
        Part("log-determinants", log_dets, (setting.pick(2, 30, 200),)),
        Part("certificates", certificates, setting.pick((4, 2), (32, 20), (64, 60))),
    ]


def table(rows: list[Row]) -> list[Row]:
    told = dict.fromkeys(row["part"] for row in rows if row["part"] != "peer")
    lines = [(part, pivot(rows, "name", "column", "value", part=part)) for part in told]
    return [{part: line.pop("name"), **line} for part, found in lines for line in found]


def judge(rows: list[Row]) -> Finding:
    value = {(row["part"], row["name"], row["column"]): row["value"] for row in rows}

    def largest(part: str, name: str, *columns: str) -> float:
        """Of the lines whose name begins so."""
        found = [(c, v) for (p, n, c), v in value.items() if p == part and n.startswith(name)]
        return max(v for column, v in found if column in columns)

    norm, gain = largest(LINEAR, "lipformer", *STAGES), largest(GAIN, OURS, *SCALES)
    bound, price = value[GAIN, OURS, "certificate"], value[LINEAR, "lipformer cap", "time"]
    pairs = [(value["tool", ATTACK, m], v) for (_, tool, m), v in value.items() if tool == CERTIFY and v]
    takes = [f"{v:.2f} at {c[:-6]}" for (p, n, c), v in value.items() if (p, n) == ("attention", OURS)]
    solvers = dict.fromkeys(n.replace(",", "").split()[0] for p, n, _ in value if p == "inverse")
    errors = [f"{name} {largest('inverse', name, *BRANCHES):.1e}" for name in solvers]
    peers = [f"{n} {v or 'not installed'}" for (p, n, _), v in value.items() if p == "peer"]
    return Finding(
        norm <= 1.0 + 1e-12
        and gain <= bound
        and largest("inverse", "lipformer", "of its promise") <= 1.0
        and largest(DET, "lipformer", "eval, nats") < 1e-9
        and all(attack <= certificate * (1.0 + 1e-9) for attack, certificate in pairs),
        f"norm at most {norm:.4f} (torch {largest(LINEAR, TORCH, *STAGES):.3g}); gain {gain:.3g} "
        f"(certified {bound:.3g}, dot-product {largest(GAIN, DOT, *SCALES):.2g}); largest error of an "
        f"inverse: {', '.join(errors)}",
        "Times are processor time of forward and backward, in that of nn.MultiheadAttention and of "
        f"torch's spectral_norm: ours {', '.join(takes)}, and for a linear layer {price:.1f}, the price "
        "of a norm that is bounded anew in each pass. Norms are of what a layer multiplies by after "
        "updates of Adam at 1e-2: in training, in eval mode, in a new layer with the whole state or the "
        "weights alone, in an average of states ('moved': how far from training). Log-determinants have "
        "the error of one draw; in training ours are noisy, too. deel-torchlip evaluates at given "
        f"inputs, from below; dot-product attention has no bound. Peers: {', '.join(peers)}.",
    )
