"""The rule: refuse, or the effective function keeps what the bound says. And shrinking what does not."""

from __future__ import annotations

import contextlib
import math
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

import lipformer as lf
from lipformer import analysis
from lipformer.layers.branch import active_dropout
from lipformer.layers.scaled import FirstOutput
from tests.promises import oracle, trees
from tests.promises.draw import draw
from tests.promises.trees import Case, Node

NORMS = ("l2", "token", "self", "linf")
REFUSALS = (lf.NotCertifiable, ValueError, TypeError, RuntimeError)
SLACK = 1e-9


@dataclass(frozen=True)
class Failure:
    """A broken promise: what was asked, the bound, and what was seen."""

    ask: str
    bound: float
    truth: float
    note: str = ""

    def __str__(self) -> str:
        ratio = self.truth / self.bound if self.bound else math.inf
        return (
            f"{self.ask}: bound {self.bound:.6g}, true {self.truth:.6g} ({ratio:.4g} times) {self.note}"
        )


@dataclass
class Outcome:
    """What became of a case: the bounds it got, and the first promise that broke."""

    bounds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    runs: bool = False
    failure: Failure | None = None


class Broken(Exception):
    """Carries a :class:`Failure` out of a check."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


@contextlib.contextmanager
def inside(case: Case) -> Iterator[None]:
    """Autocast as the case has it; undoes global hooks."""
    dtype = None if case.autocast is None else getattr(torch, case.autocast)
    try:
        with (
            warnings.catch_warnings(),
            oracle.remembered_norms(),
            torch.autocast("cpu", dtype=dtype, enabled=dtype is not None),
        ):
            warnings.simplefilter("ignore")  # what torch says of odd modules
            yield
    finally:
        trees.clean()


def asks_of(case: Case) -> tuple[str, ...]:
    """What is asked of a case: the certificate always, something more by its seed."""
    if case.tree[0] in ("dot_product", "torch_attention"):
        return ("ball", "local", "lofast", "perturbation")
    extra = ("contractive", "perturbation", "radius", "invertible", "example")[case.seed % 5]
    return ("perturbation", "radius") if trees.is_local(case) else ("certify", extra)


def examine(case: Case, asks: tuple[str, ...] | None = None) -> Outcome:
    """Asks everything about a case."""
    outcome = Outcome()
    dtype = getattr(torch, case.dtype)
    torch.default_generator.manual_seed(case.seed)
    with inside(case):
        try:
            module = asked("build", outcome, lambda: trees.build(case.tree, case.dtype))
            if module is None:
                return outcome
            x = structured(case)
            with torch.no_grad(), contextlib.suppress(*REFUSALS, IndexError, NotImplementedError):
                real = oracle.call(module, x.to(dtype))
                outcome.runs = bool(torch.is_floating_point(real))
            for ask in asks_of(case) if asks is None else asks:
                CHECKS[ask](case, module, x, outcome)
        except Broken as broken:
            outcome.failure = broken.failure
    return outcome


def asked(name: str, outcome: Outcome, ask: Callable[[], object]) -> object:
    """The answer, or None if it was refused with a message; any other exception is a failure."""
    try:
        return ask()
    except REFUSALS as error:
        if isinstance(error, (IndexError, KeyError, AttributeError)) or not str(error):
            raise Broken(Failure(f"{name} crashed", math.nan, math.nan, repr(error))) from error
        outcome.refused[name] = str(error)
    except (oracle.Unsupported, AssertionError):
        raise
    except Exception as error:
        raise Broken(Failure(f"{name} crashed", math.nan, math.nan, repr(error)[:200])) from error
    return None


# --- inputs -----------------------------------------------------------------------------------


def structured(case: Case) -> Tensor:
    """Samples of known extremes along the batch axis, in float64, exact in the case's dtype."""
    rng = random.Random(case.seed)
    torch.default_generator.manual_seed(case.seed)  # whatever the tree drew before
    total = math.prod(case.shape)
    samples = [
        torch.zeros(total),
        torch.randn(total),
        100 * torch.randn(total),
        1e-3 * torch.randn(total),
    ]
    # Tokens as they are, and as a container may cut the sample anew.
    for n in (case.shape[0], rng.choice([k for k in range(1, total + 1) if total % k == 0])):
        direction = torch.randn(total // n)
        direction = direction / direction.norm()
        samples.append(direction.repeat(n) * 2)  # equal tokens
        for size in (1.5, 3.0):
            star = torch.zeros(n, total // n)
            star[rng.randrange(n)] = size * direction
            samples.append(star.flatten())
        clusters = torch.where(torch.arange(n)[:, None] % 2 == 0, direction, -direction)
        samples.append((clusters * rng.choice((0.5, 1.0, 3.0))).flatten())
    x = torch.stack([s.double() for s in samples]).reshape(-1, *case.shape)
    return x.to(getattr(torch, case.dtype)).double().movedim(0, case.batch_axis)


def function(case: Case, module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The effective function of a module."""
    return oracle.Effective(module, getattr(torch, case.dtype))


def mixes(fn: Callable[[Tensor], Tensor], x: Tensor, axis: int) -> bool:
    """Whether a sample alone gives something else than in its batch."""
    with torch.no_grad():
        together = fn(x)
        for k in (1, x.shape[axis] - 1):
            alone = fn(x.narrow(axis, k, 1))
            if together.ndim <= axis or together.shape[axis] != x.shape[axis]:
                return True
            same = together.narrow(axis, k, 1)
            if alone.shape != same.shape:
                return True
            scale = same.abs().max().clamp_min(1e-300)
            if not bool(((alone - same).abs() <= 1e-9 * scale).all()) and bool(same.isfinite().all()):
                return True
    return False


# --- gains ------------------------------------------------------------------------------------


def largest_gains(case: Case, module: nn.Module, x: Tensor, norms: tuple[str, ...]) -> dict[str, float]:
    """The largest gain seen in each norm, at structured and at ascended inputs."""
    fn, axis = function(case, module), case.batch_axis
    if mixes(fn, x, axis):
        # A batch is one input then; more samples than tokens, for attention that takes them for tokens.
        x = torch.stack([x.narrow(axis, start, 6) for start in (0, 3)])
        inner, axis = fn, 0
        fn = lambda many: torch.stack([inner(one) for one in many])  # noqa: E731
    extreme = any("scale" in o and not 1e-3 < o["scale"] < 1e3 for _, o, _ in trees.nodes(case.tree))
    best = dict.fromkeys(norms, 0.0)
    width_out = None
    for round_ in range(2):
        if width_out is None:
            with torch.no_grad():
                width_out = fn(x).shape[-1]
        for seed_scale in (1.0, 1e-150, 1e150) if extreme else (1.0,):
            jacobian = oracle.jacobians(fn, x, axis, seed_scale)
            finite = jacobian.isfinite().all(2).all(1)
            jacobian = torch.where(finite[:, None, None], jacobian, 0.0)
            for norm in norms:
                seen = oracle.gain(jacobian, norm, width_out, x.shape[-1])
                if seen is not None:
                    best[norm] = max(best[norm], float(seen.max()) / seed_scale)
        if round_ == 0:
            x = oracle.ascended(fn, x, axis, jacobian, 2)
    return best


def compare(ask: str, bound: float, truth: float, note: str = "") -> None:
    if truth > bound * (1 + SLACK) + 1e-300:
        raise Broken(Failure(ask, bound, truth, note))


def check_certify(case: Case, module: nn.Module, x: Tensor, outcome: Outcome) -> None:
    for norm in NORMS:
        found = asked(
            f"certify {norm}",
            outcome,
            lambda norm=norm: lf.certify(module, seq_len=case.seq_len, norm=norm),
        )
        if found is not None:
            outcome.bounds[norm] = found.bound
    if outcome.bounds and outcome.runs:
        gains = largest_gains(case, module, x, tuple(outcome.bounds))
        for norm, gain in gains.items():
            compare(f"certify {norm}", outcome.bounds[norm], gain)


def check_example(case: Case, module: nn.Module, x: Tensor, outcome: Outcome) -> None:
    """What is planted is followed, or refused."""
    if not outcome.runs or case.batch_axis:
        return
    some, bounds = samples(case, x).to(getattr(torch, case.dtype)), {}
    for norm in NORMS:
        found = asked(
            f"example {norm}", outcome, lambda norm=norm: lf.certify(module, example=some, norm=norm)
        )
        if found is not None:
            bounds[norm] = found.bound
    if bounds and mixes(function(case, module), x, 0):
        raise Broken(Failure("example", math.nan, math.nan, "a sample alone has another output"))
    gains = largest_gains(case, module, x, tuple(bounds)) if bounds else {}
    for norm, gain in gains.items():
        compare(f"example {norm}", bounds[norm], gain)


def check_contractive(case: Case, module: nn.Module, x: Tensor, outcome: Outcome) -> None:
    """Not with dropout on, which counts as in eval mode, as the docs say."""
    norm = random.Random(case.seed).choice((None, "l2", "token", "self", "linf"))
    name = f"Contractive {norm}"
    if not outcome.runs or active_dropout(module):
        return
    wrapped = asked(name, outcome, lambda: lf.Contractive(module, 0.9, norm=norm, seq_len=case.seq_len))
    if wrapped is None or not answers(name, outcome, wrapped, x, case):
        return
    norm = wrapped.norm_in_use()
    gain = largest_gains(case, wrapped, x, (norm,))[norm]
    compare(f"Contractive {norm}", promised(case, wrapped, norm, 0.9), gain)


def promised(case: Case, module: nn.Module, norm: str, coeff: float) -> float:
    """The coefficient; inside autocast, which rounds once more, what certify says there."""
    return coeff if case.autocast is None else lf.certify(module, norm=norm, seq_len=case.seq_len).bound


def check_invertible(case: Case, module: nn.Module, x: Tensor, outcome: Outcome) -> None:
    if not outcome.runs or active_dropout(module) or case.batch_axis or len(case.shape) != 2:
        return
    name = "InvertibleResidual"
    block = asked(name, outcome, lambda: lf.InvertibleResidual(module, 0.9, seq_len=case.seq_len))
    if block is None or not answers(name, outcome, block, x, case):
        return
    norm = block.norm_in_use()
    gain = largest_gains(case, block.branch, x, (norm,))[norm]
    compare(f"{name} branch {norm}", promised(case, block.branch, norm, 0.9), gain)


def check_spectral(case: Case, module: nn.Module, x: Tensor, outcome: Outcome) -> None:
    """The constant that lf.spectral_bound promises of a layer by itself."""
    coeff = {"spectral": 0.8, "normalize": 2.0}[case.tree[1]["params"][-1]]
    if outcome.runs and answers("spectral", outcome, module, x, case):
        gain = largest_gains(case, module, x, ("l2",))["l2"]
        compare("spectral", promised(case, module, "l2", coeff), gain)


def answers(name: str, outcome: Outcome, module: nn.Module, x: Tensor, case: Case) -> bool:
    """Whether the module runs; refusing to is an answer."""
    with torch.no_grad():
        return (
            asked(f"{name} forward", outcome, lambda: module(x.to(getattr(torch, case.dtype))))
            is not None
        )


# --- finite perturbations ---------------------------------------------------------------------


def samples(case: Case, x: Tensor) -> Tensor:
    """The structured samples first in their batch, whatever the tree takes: exact in its dtype."""
    return x.movedim(case.batch_axis, 0)[[1, 3, 4, 5, 7]].contiguous()


def check_perturbation(case: Case, module: nn.Module, x: Tensor, outcome: Outcome) -> None:
    x, fn, dtype = samples(case, x), function(case, module), getattr(torch, case.dtype)
    delta = random.Random(case.seed).choice((1e-2, 0.3, 2.0))
    found = asked(
        "perturbation", outcome, lambda: analysis.perturbation_bound(module, x.to(dtype), delta)
    )
    if found is None or not runs(module, x, dtype):
        return
    if mixes(fn, x, 0):
        raise Broken(Failure("perturbation", math.nan, math.nan, "a sample alone has another output"))
    moved, bounds = oracle.farthest(fn, x, torch.full((len(x),), delta, dtype=torch.float64)), found[1]
    with torch.no_grad():
        noise = 1e-12 * fn(x).flatten(1).abs().amax(1).nan_to_num(0.0)
    worst = int(((moved - noise) / bounds.clamp_min(1e-300)).argmax())
    compare("perturbation", float(bounds[worst] + noise[worst]), float(moved[worst]), f"delta {delta}")


def runs(module: nn.Module, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether a module runs on x at all."""
    try:
        with torch.no_grad():
            oracle.call(module, x.to(dtype))
    except (*REFUSALS, IndexError):
        return False
    return True


def check_radius(case: Case, module: nn.Module, x: Tensor, outcome: Outcome) -> None:
    x, dtype = samples(case, x), getattr(torch, case.dtype)
    if not runs(module, x, dtype):
        return
    with torch.no_grad():
        out = function(case, module)(x)
    if out.ndim < 2 or len(out) != len(x):
        return
    if isinstance(module, lf.L2MultiheadAttention):  # whose output is a tuple
        module = FirstOutput(module)
    head = nn.Linear(out[0].numel(), 3, dtype=torch.float64).requires_grad_(False).to(dtype)
    model = nn.Sequential(module, nn.Flatten(), head)
    fn = function(case, model)
    with torch.no_grad():
        logits = fn(x)
    labels = logits.argmax(1)
    labels[-1] = (labels[-1] + 1) % 3  # a wrong one
    radius = asked("radius", outcome, lambda: analysis.certified_radius(model, x.to(dtype), labels))
    if radius is None:
        return
    for k in (radius > 0).nonzero().flatten().tolist():
        with torch.no_grad():
            alone = fn(x[k : k + 1])[0]
        lost = float(alone.max() - alone[labels[k]])
        if lost > 1e-9 * float(alone.abs().max()):
            note = f"certified label {int(labels[k])}, alone it is {int(alone.argmax())}"
            raise Broken(Failure("radius", 0.0, float(radius[k]), note))
    margin = attacked(fn, x, labels, radius)
    worst = int(torch.where(radius > 0, margin, -math.inf).argmax())
    if float(radius[worst]) > 0 and float(margin[worst]) > 1e-9 * float(logits[worst].abs().max()):
        raise Broken(
            Failure("radius", 0.0, float(margin[worst]), f"label changes within {radius[worst]}")
        )


def attacked(fn: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor, radius: Tensor) -> Tensor:
    """The largest margin (B,) of another label seen within the radius of each sample."""
    other = torch.nn.functional.one_hot(labels, 3).bool()
    best = torch.full((len(x),), -math.inf, dtype=torch.float64)
    reach = radius[:, None] * (1 - 1e-9)
    move = torch.zeros_like(x)
    for _ in range(6):
        point = (x + move).requires_grad_()
        logits = fn(point)
        margin = logits.masked_fill(other, -math.inf).amax(1) - logits.gather(1, labels[:, None])[:, 0]
        best = torch.maximum(best, margin.detach().nan_to_num(-math.inf))
        if not margin.requires_grad:
            break
        (grad,) = torch.autograd.grad(margin.sum(), point)
        move = (oracle.unit(move.flatten(1) + oracle.unit(grad.flatten(1)) * reach) * reach).reshape(
            x.shape
        )
    return best


# --- dot-product attention --------------------------------------------------------------------


def check_ball(case: Case, module: nn.Module, x: Tensor, outcome: Outcome) -> None:
    bound = asked("ball", outcome, lambda: analysis.ball_bound(module, case.shape[0], 3.0))
    if bound is None or not outcome.runs:
        return
    longest = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-300)
    inside_ball = x * (3.0 / longest).clamp_max(1.0)
    jacobian = oracle.jacobians(function(case, module), inside_ball, case_axis(case))
    compare("ball", bound, float(oracle.gain(jacobian, "l2", 1, 1).max()))


def check_local(case: Case, module: nn.Module, x: Tensor, outcome: Outcome) -> None:
    dtype = getattr(torch, case.dtype)
    bound = asked("local", outcome, lambda: analysis.local_bound(module, x.to(dtype)))
    if bound is None or not outcome.runs:
        return
    jacobian = oracle.jacobians(function(case, module), x, case_axis(case))
    truth = oracle.gain(jacobian, "l2", 1, 1)
    worst = int((truth / bound.double()).argmax())
    compare("local", float(bound[worst]), float(truth[worst]))


def check_lofast(case: Case, module: nn.Module, x: Tensor, outcome: Outcome) -> None:
    dtype = getattr(torch, case.dtype)
    x = samples(case, x)
    bound = asked("lofast", outcome, lambda: analysis.lofast_bound(module, x.to(dtype), 0.3))
    if bound is None or not outcome.runs:
        return
    fn = function(case, module)
    moved = oracle.farthest(fn, x, torch.full((len(x),), 0.3, dtype=torch.float64))
    worst = int((moved / bound.double()).argmax())
    compare("lofast", float(bound[worst]) + 1e-12 * float(x.abs().max()), float(moved[worst]))


def case_axis(case: Case) -> int:
    """The batch axis of an attention layer by itself."""
    return case.batch_axis if case.tree[1].get("batch_first", True) else 1


CHECKS = {
    "certify": check_certify,
    "example": check_example,
    "contractive": check_contractive,
    "invertible": check_invertible,
    "spectral": check_spectral,
    "perturbation": check_perturbation,
    "radius": check_radius,
    "ball": check_ball,
    "local": check_local,
    "lofast": check_lofast,
}


# --- shrinking --------------------------------------------------------------------------------


def smaller(case: Case) -> Iterator[Case]:
    """Cases a step simpler, the largest steps first."""
    for node in trees.nodes(case.tree):
        for child in node[2]:
            yield replace(
                case, tree=trees.replaced(case.tree, node, child)
            )  # a node's child in its place
    for node in trees.nodes(case.tree):
        if node is not case.tree:
            with contextlib.suppress(ValueError):
                yield replace(case, tree=trees.replaced(case.tree, node, None))
    for node in trees.nodes(case.tree):
        for name in ("defect", "share", "scale", "planted"):
            if name in node[1]:
                yield _with(case, node, {k: v for k, v in node[1].items() if k != name})
        if "params" in node[1]:
            rest = node[1]["params"][:-1]
            kept = {k: v for k, v in node[1].items() if k != "params"}
            yield _with(case, node, kept | ({"params": rest} if rest else {}))
        for name in (
            "value_proj",
            "positions",
            "window",
            "proj_coeff",
            "any_mask",
            "max_len",
            "padding_mode",
        ):
            if name in node[1]:
                yield _with(case, node, {k: v for k, v in node[1].items() if k != name})
        for name, plain in (("bias", False), ("affine", False), ("heads", 1), ("seed", 0)):
            if node[1].get(name, plain) != plain:
                yield _with(case, node, node[1] | {name: plain})
    if case.autocast is not None:
        yield replace(case, autocast=None)
    if case.dtype != "float64":
        yield replace(case, dtype="float64")


def _with(case: Case, node: Node, options: dict) -> Case:
    return replace(case, tree=trees.replaced(case.tree, node, (node[0], options, node[2])))


def excess(failure: Failure) -> float:
    """By how much a bound was exceeded, of the bound; infinite where no ratio says it."""
    known = failure.bound and math.isfinite(failure.truth)
    return failure.truth / failure.bound - 1 if known else math.inf


def shrink(case: Case, failure: Failure, budget: int = 300) -> tuple[Case, Failure]:
    """A smaller case that breaks the same promise, by at least half as much."""
    ask = failure.ask.split()[0].lower().removesuffix("residual")
    asks = (ask,) if ask in CHECKS else None
    least = min(0.5, excess(failure) / 2)
    candidates = smaller(case)
    for _ in range(budget):
        candidate = next(candidates, None)
        if candidate is None:
            break
        try:
            found = examine(candidate, asks).failure
        except Exception:  # the pieces no longer fit together
            continue
        if found is not None and found.ask == failure.ask and excess(found) >= least:
            case, failure = candidate, found
            candidates = smaller(case)
    return case, failure


def report(seed: int, outcome: Outcome) -> str:
    """What a developer needs: the seed, the tree shrunk, what was planted, how far it is off."""
    case, failure = shrink(draw(seed), outcome.failure)
    return (
        f"seed {seed}: {outcome.failure}\n  shrunk: {failure}\n"
        f"  planted: {trees.planted(case) or 'nothing'}\n  checks.examine(trees.{case!r})"
    )


# --- many cases -------------------------------------------------------------------------------


def examine_seeds(seeds: range) -> None:
    """Draws and examines the cases of many seeds.

    Raises:
        AssertionError: with the shrunk cases, if a promise broke, or if too few modules got a bound.
    """
    broken: list[tuple[int, Outcome]] = []
    drawn = bounded = running = 0
    for seed in seeds:
        case = draw(seed)
        outcome = examine(case)
        if outcome.failure is not None:
            broken.append((seed, outcome))
        running += outcome.runs or "build" in outcome.refused
        if not trees.planted(case) and not trees.is_local(case) and (outcome.runs or outcome.refused):
            drawn += 1
            bounded += bool(outcome.bounds)
    # One of each promise, the shrunk of them first: a hundred trees may have one cause.
    kinds = {outcome.failure.ask: (seed, outcome) for seed, outcome in reversed(broken)}
    reports = "\n".join(report(*found) for found in kinds.values())
    count = f"{len(broken)} of {len(seeds)} trees broke a bound: seeds {[seed for seed, _ in broken]}"
    assert not broken, f"{count}\n{reports}"
    assert bounded >= 0.6 * drawn, f"only {bounded} of {drawn} trees with nothing planted got a bound"
    assert running >= 0.85 * len(seeds), f"only {running} of {len(seeds)} trees run"
