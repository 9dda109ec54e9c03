"""This project: Beside other people's layers and tools.

norms, inverses, log-determinants and certificates are what they are said to be.

Left: attention at inputs of rising size. Middle: linear layers that promise a norm of 1, after updates
by Adam: in training, in eval mode, in a new layer with the whole state or the weights alone, and in an
average of states. Right: inverses of residual blocks of coefficient 0.9, in float32.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import product
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
from recipes.papers.experiment import Finding, Panel, Part, Row, Rows, Setting

PEERS = ("x-transformers", "deel-torchlip", "orthogonium", "normflows", "FrEIA")
SCALES, STAGES = ("1", "10", "100", "1000"), ("training", "eval", "loaded", "weights alone", "averaged")
BRANCHES = ("attention, norm", "attention, causal", "feed-forward", "rotation")
OURS, DOT, TORCH = variant("lean").label, variant("mha").label, "torch spectral_norm"
GAIN, LINEAR, DET = "gain of attention at input size", "linear layer", "log-determinant"
ATTACK, CERTIFY, DEEL = "attack, from below", "lipformer certify", "deel-torchlip evaluate_lip_const"
LINEARS = [TORCH, "deel-torchlip SpectralLinear", "orthogonium OrthoLinear"]
LINEARS += ["lipformer cap", "lipformer normalize", "lipformer orthogonal"]
ASKED = ("attention", GAIN, LINEAR, "inverse", DET, "tool")
_CELLS = partial(Panel, "column", "value", "name")
TABLES = [_CELLS({"part": part}, "y", part) for part in ASKED]
SHOWN = [(GAIN, SCALES, "largest gain"), (LINEAR, STAGES, "spectral norm")]
SHOWN += [("inverse", BRANCHES, "error / largest entry")]
PANELS = [_CELLS({"part": part, "column": some}, "y", part, y) for part, some, y in SHOWN]
_TWICE = partial(sdpa_kernel, SDPBackend.MATH)  # the kernel that has second derivatives
Cells = Iterable[tuple[str, str, Any]]  # of a table: the line's name, the column, the value


def measure(table: str, work: Callable[..., Cells], args: tuple[Any, ...], folder: Path) -> Rows:
    """The cells of a table, a row each."""
    return [{"part": table, "name": n, "column": c, "value": v} for n, c, v in work(*args)]


def versions() -> Cells:
    """Of the peers; None of those that are not installed: pip install 'lipformer[bench,flows]'."""
    return [(name, "version", v) for name, v in environment(*PEERS).items() if name in PEERS]


def _times(column: str, layers: Mapping[str, nn.Module], x: Tensor, seconds: float) -> Cells:
    """Processor time of forward and backward passes in times of the first layer."""
    steps = {name: training_step(layer, x) for name, layer in layers.items()}
    samples = interleave(steps, seconds=seconds, min_repetitions=3, timer=time.process_time)
    ratios = {name: samples.ratio(name, next(iter(steps))) for name in steps}
    return [(name, column, ratio.median) for name, ratio in ratios.items() if ratio]


def _layers(shape: Shape, *keys: str) -> dict[str, nn.Module]:
    """The layers of the benchmark that are installed, by label."""
    found = {}
    for key in keys:
        torch.manual_seed(0)
        with suppress(ImportError):
            found[variant(key).label] = variant(key).build(shape)
    return found


def speeds(n: int, tokens: int, dim: int, seconds: float) -> Cells:
    """Attention in times of nn.MultiheadAttention."""
    keys = ("mha", "lean", "paper", "cdist", "xt_flash", "xt_dense")
    layers = _layers(Shape(dim, 2 if dim < 64 else 8, n), *keys)
    return _times(f"{n} tokens, time", layers, torch.randn(tokens // n, n, dim), seconds)


def _norm(matrix: Tensor) -> float:
    return torch.linalg.matrix_norm(matrix.detach().double(), 2).item()


def steepness(scales: tuple[str, ...], tries: int) -> Cells:
    """The largest Jacobian at the steepest points between random inputs of each size."""
    n, dim = 8, 16
    for name, layer in _layers(Shape(dim, 2, n), "mha", "xt_dense", "cdist", "lean").items():
        layer.double().eval()
        for scale in scales:
            draw = torch.Generator().manual_seed(0)
            ends = float(scale) * torch.randn(2, tries, n, dim, generator=draw).double()
            # Dense: torch.cdist, which x-transformers uses too, cannot be differentiated twice.
            dense = [jacobian(layer, x[None]) for x in steepest_point(layer, ends[0], ends[1], "l2")]
            yield name, scale, max(_norm(j.reshape(n * dim, -1)) for j in dense)
        if name == OURS:
            yield name, "certificate", lf.certify(layer.get_submodule("layer"), seq_len=n).bound


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
    return _peer(module, name.split()[1])(width, width, bias=False)


def _trained(name: str, width: int, updates: int, seed: int) -> dict[str, Tensor]:
    """What a layer is at each stage, after updates by Adam towards a map of large norm.

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
    loaded, alone = _linear(name, width), _linear(name, width)
    loaded.load_state_dict(layer.state_dict())
    raw = "parametrizations.weight.original"
    alone.load_state_dict({raw: layer.state_dict()[raw]}, strict=False)
    lives = (copy.deepcopy(layer).eval(), loaded.eval(), alone.eval(), average.module.eval())
    with torch.no_grad():
        return {k: life(torch.eye(width)) for k, life in zip(STAGES, (layer, *lives), strict=True)}


def norms(width: int, updates: int, seeds: int, seconds: float) -> Cells:
    """True spectral norms, the largest of some seeds; how far from training a stage is; times."""
    layers = {}
    for name in LINEARS:
        with suppress(ImportError):
            layers[name] = _linear(name, width)
            found = [_trained(name, width, updates, seed) for seed in range(seeds)]
            for stage in STAGES:
                yield name, stage, max(_norm(one[stage]) for one in found)
            for stage in ("eval", "weights alone"):
                yield name, f"{stage} moved", max(_norm(one[stage] - one["training"]) for one in found)
    yield from _times("time", layers, torch.randn(64, width), seconds)


def inverses(batch: int, length: int, dim: int) -> Cells:
    """Errors and evaluations of inverses of the same blocks, and how much of ours was promised."""
    torch.manual_seed(0)
    x, options = torch.randn(batch, length, dim), inverse.arguments(["--quick", "--tols", "1e-6"])
    for name, block in inverse.branches(dim, 2, length, 0.9).items():
        for row in inverse.rows_of(name, block.eval(), x, 1.0, options):
            yield row["solver"], name, row["error"]
            yield row["solver"], "evaluations", row["evaluations"]
            if row["promised"]:
                yield row["solver"], "of its promise", row["error"] / row["promised"]


def log_dets(draws: int) -> Cells:
    """Errors of a block's log-determinants (root mean square of single draws), each tool as it comes.

    Against the dense Jacobian in float64, in eval and in training mode.
    """
    torch.manual_seed(0)
    size = 4  # of samples, tokens and features
    block = inverse.branches(size, 2, size, 0.9)["attention, norm"].double()
    x = torch.randn(size, size, size).double()
    dense = torch.stack([jacobian(lambda z: block(z[None])[0], one) for one in x])
    exact = torch.linalg.slogdet(dense.reshape(size, size * size, -1))[1]
    tools: dict[str, Any] = {"lipformer": block, **inverse.peer_blocks(block.branch, size)}
    for (name, tool), mode in product(tools.items(), ("eval", "training")):
        tool.train(mode == "training")
        told = block.forward_and_log_det if tool is block else tool
        given = [x.clone() for _ in range(draws)]  # the peers switch its gradient on
        with _TWICE():
            found = [told([z] if "FrEIA" in name else z)[1].detach() for z in given]
        yield name, f"{mode}, nats", (torch.stack(found) - exact).square().mean().sqrt().item()


def certificates(length: int, steps: int) -> Cells:
    """What each tool answers for each model, beside an attack; None where it refuses."""
    torch.manual_seed(0)
    x = torch.randn(4, length, 16).double()
    models: dict[str, nn.Module] = {
        "MLP": nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)),
        "L2 block": lf.Residual(lf.L2MultiheadAttention(16, 2, batch_first=True)),
        "dot-product block": lf.Residual(TorchAttention(Shape(16, 2, length))),
    }
    for name, model in models.items():
        model.double().eval()
        with suppress(lf.NotCertifiable):
            yield CERTIFY, name, lf.certify(model, seq_len=length).bound
        with suppress(ImportError), _TWICE():
            yield ATTACK, name, lf.attack_lipschitz(model, x[:1], steps=steps, restarts=8).value
            evaluate = _peer("deel.torchlip.utils.evaluate_lip_const", "evaluate_lip_const")
            yield DEEL, name, evaluate(model, x)


def parts(setting: Setting) -> list[Part]:
    def part(name: str, table: str, work: Callable[..., Cells], *sizes: tuple[Any, ...]) -> Part:
        return Part(name, measure, (table, work, setting.pick(*sizes)))

    lengths = setting.pick([16], [256], [256, 1024])
    speed = [(32, 16, 0.0), (1024, 256, 10.0), (4096, 512, 40.0)]  # tokens, D, seconds
    return [
        part("versions", "peer", versions, (), (), ()),
        *(part(f"speed at {n} tokens", "attention", partial(speeds, n), *speed) for n in lengths),
        part("steepness", GAIN, steepness, (SCALES[:2], 1), (SCALES, 8), (SCALES, 32)),
        part("norms", LINEAR, norms, (8, 2, 1, 0.0), (128, 50, 2, 5.0), (256, 50, 4, 20.0)),
        part("inverses", "inverse", inverses, (2, 4, 4), (4, 32, 32), (8, 64, 64)),
        part("log-determinants", DET, log_dets, (2,), (30,), (200,)),
        part("certificates", "tool", certificates, (4, 2), (32, 20), (64, 60)),
    ]


def judge(rows: list[Row]) -> Finding:
    cells = [(row["part"], row["name"], row["column"], row["value"]) for row in rows]

    def largest(part: str, name: str, *columns: str) -> float:
        """Of the lines whose name begins so."""
        return max(v for p, n, c, v in cells if p == part and n.startswith(name) and c in columns)

    norm, gain = largest(LINEAR, "lipformer", *STAGES), largest(GAIN, OURS, *SCALES)
    bound = largest(GAIN, OURS, "certificate")
    certified = {model: v for _, tool, model, v in cells if tool == CERTIFY and v}
    solvers = dict.fromkeys(n.replace(",", "").split()[0] for p, n, *_ in cells if p == "inverse")
    errors = [f"{name} {largest('inverse', name, *BRANCHES):.1e}" for name in solvers]
    peers = [f"{n} {v or 'not installed'}" for p, n, _, v in cells if p == "peer"]
    return Finding(
        norm <= 1.0 + 1e-12
        and gain <= bound
        and largest("inverse", "lipformer", "of its promise") <= 1.0
        and largest(DET, "lipformer", "eval, nats") < 1e-9
        and all(largest("tool", ATTACK, k) <= v * (1.0 + 1e-9) for k, v in certified.items()),
        f"norm at most {norm:.4f} (torch {largest(LINEAR, TORCH, *STAGES):.3g}); gain {gain:.3g} "
        f"(certified {bound:.3g}, dot-product {largest(GAIN, DOT, *SCALES):.2g}); largest error of an "
        f"inverse: {', '.join(errors)}",
        "Times are processor time of forward and backward, in that of the first line; 'moved' is how "
        "far from training. Log-determinants have the error of one draw. deel-torchlip evaluates at "
        f"given inputs, from below. Peers: {', '.join(peers)}.",
    )
