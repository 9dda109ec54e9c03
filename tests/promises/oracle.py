"""The function that a module really is, and how steep it is: independent of lipformer's rules.

The effective function has the weights that the module derives in its own dtype (a normalised weight of a
bfloat16 module is rounded to bfloat16, under autocast a float32 weight to autocast's dtype) and exact
activations. class:`Effective` runs the module's own forward, hooks and overrides included, on float64
inputs which say that they have the module's dtype; gains are read off dense Jacobians.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from lipformer.functional.spectral.bound import _RECIPES
from lipformer.layers.activations import _SortPairs

LOW = (torch.float16, torch.bfloat16, torch.float32)
DTYPE = Tensor.dtype.__get__
CASTS = {
    Tensor.double: torch.float64,
    Tensor.float: torch.float32,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}
# What autocast runs in its own dtype on a CPU.
CAST_BY_AUTOCAST = {
    F.linear, F.conv1d, F.conv2d, F.scaled_dot_product_attention, F.multi_head_attention_forward,
    torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm, torch.bmm,
    Tensor.bmm, torch.addmm, torch.baddbmm, torch.einsum,
}  # fmt: skip

# Of the input's dtype, whatever that of the weights.
LIKE_INPUT = {F.layer_norm, F.rms_norm, torch.rms_norm, F.batch_norm, F.group_norm, F.prelu}


class Unsupported(Exception):
    """The oracle would round an activation: a gap of the oracle, not of the package."""


def _tensors(values: Iterable[object], found: list[Tensor]) -> None:
    """Collects the tensors among arguments, in lists and tuples too."""
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _tensors(value, found)


def _mapped(value: object, change: Callable[[Tensor], object]) -> object:
    """Arguments with their tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(part, change) for part in value)
    return value


@dataclass
class Tape:
    """The operations of a forward pass that depend on its input, to be run again on another one.

    Weights are derived once, and neither modules nor modes are called again.

    Attributes:
        held: all tensors that depend on the input, in the order in which they appeared.
        steps: function, arguments with a :class:`Slot` for each such tensor, whether with gradients.
        replays: False once a value was read, since then another input may take another way.
    """

    held: list[Tensor] = field(default_factory=list)
    steps: list[tuple[Callable, object, dict, bool]] = field(default_factory=list)
    replays: bool = True
    out: int = 0

    def add(self, tensor: Tensor, claim: torch.dtype) -> None:
        tensor.claim, tensor.slot = claim, len(self.held)
        self.held.append(tensor)

    def run(self, x: Tensor) -> Tensor:
        found = [x]

        def fill(value: object) -> object:
            if isinstance(value, Slot):
                return found[value.index]
            return type(value)(map(fill, value)) if type(value) in (list, tuple) else value

        for func, args, kwargs, grad in self.steps:
            with contextlib.nullcontext() if grad else torch.no_grad():
                out = func(*fill(args), **{name: fill(value) for name, value in kwargs.items()})
            _tensors((out,), found)
        return found[self.out]


@dataclass(frozen=True)
class Slot:
    """Where a tensor stands on a :class:`Tape`."""

    index: int


READS = {
    "item",
    "__bool__",
    "tolist",
    "equal",
    "allclose",
    "__float__",
    "__int__",
    "is_nonzero",
    "numpy",
}


class ExactActivations(TorchFunctionMode):
    """Whatever depends on the input is held in float64 and claims the dtype it would have.

    A claim is the attribute ``claim`` of a tensor; weights have none and are computed with as ever.
    Where the two meet, the weight is widened, which is exact.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func == DTYPE:
            return getattr(args[0], "claim", None) or func(args[0])
        held: list[Tensor] = []
        _tensors((*args, *kwargs.values()), held)
        if not any(hasattr(t, "claim") for t in held):
            if any(t.requires_grad for t in held):
                raise Unsupported(f"{func} has an activation that came out of nowhere")
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in READS:
            self.tape.replays = False
        if func in CASTS:
            func, args, kwargs, claim = torch.mul, (args[0], 1.0), {}, CASTS[func]
        elif func is Tensor.to:
            wanted = self._wanted(*args[1:], **kwargs)
            if not hasattr(args[0], "claim"):  # a weight, to the dtype of an activation
                return args[0] if wanted is None else args[0].to(wanted)
            if wanted is None:
                return args[0]
            claim, kwargs = wanted, {}
            if args[0].is_floating_point() and wanted.is_floating_point:
                func, args = torch.mul, (args[0], 1.0)
            else:
                args = (args[0], torch.float64 if wanted.is_floating_point else wanted)
        elif func is torch.result_type:
            return self._promoted(held)
        else:
            claim = self._promoted(held[:1] if func in LIKE_INPUT else held)
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        target = kwargs.get("out", args[0] if writes else None)
        if isinstance(target, Tensor) and target.dtype in LOW:
            raise Unsupported(f"{func} writes an activation into a tensor of {target.dtype}")
        rounded = None
        if func in CAST_BY_AUTOCAST and torch.is_autocast_enabled("cpu") and claim != torch.float64:
            claim = rounded = torch.get_autocast_dtype("cpu")
        if isinstance(kwargs.get("dtype"), torch.dtype):
            claim = kwargs["dtype"]
            kwargs = {k: v for k, v in kwargs.items() if k != "dtype"}

        def widen(tensor: Tensor) -> Tensor:
            if hasattr(tensor, "claim") or not tensor.is_floating_point():
                return tensor
            if rounded is not None and tensor.dtype != torch.float64:
                tensor = tensor.to(rounded)
            return tensor.double()

        args = _mapped(args, widen)
        kwargs = {name: _mapped(value, widen) for name, value in kwargs.items()}
        casts = torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", enabled=False) if casts else contextlib.nullcontext():
            out = func(*args, **kwargs)
        results: list[Tensor] = []
        _tensors((out,), results)
        if results or writes:
            self._record(func, args, kwargs, results, claim)
        return out

    def _record(
        self, func: Callable, args: object, kwargs: dict, results: list[Tensor], claim: torch.dtype
    ) -> None:
        def slot(tensor: Tensor) -> object:
            return Slot(tensor.slot) if hasattr(tensor, "claim") else tensor

        kwargs = {name: _mapped(value, slot) for name, value in kwargs.items()}
        self.tape.steps.append((func, _mapped(args, slot), kwargs, torch.is_grad_enabled()))
        for result in results:
            self.tape.add(result, claim if result.is_floating_point() else result.dtype)

    @staticmethod
    def _wanted(*args: object, **kwargs: object) -> torch.dtype | None:
        """The dtype that the arguments of Tensor.to name, if any."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.dtype):
                return value
            if isinstance(value, Tensor):
                return getattr(value, "claim", None) or value.dtype
        return None

    @staticmethod
    def _promoted(held: list[Tensor]) -> torch.dtype:
        """torch's promotion: numbers without dimensions count only among themselves."""
        floats = [t for t in held if t.is_floating_point()] or held
        pool = [t for t in floats if t.ndim] or floats
        found = torch.bool
        for tensor in pool:
            found = torch.promote_types(found, getattr(tensor, "claim", None) or tensor.dtype)
        return found


@contextlib.contextmanager
def remembered_norms() -> Iterator[None]:
    """Computes the spectral bound of each value of a weight once: it is a pure function, and most of the
    time of a forward pass and of a certificate."""
    recipe = _RECIPES["cholesky"]
    known: dict[tuple, tuple[Tensor, ...]] = {}

    def value(weight: Tensor) -> tuple[Tensor, ...]:
        with torch._C.DisableTorchFunction():
            key = (weight.shape, weight.dtype, weight.detach().double().numpy().tobytes())
            if key not in known:
                known[key] = recipe.value(weight)
            return tuple(part.clone() for part in known[key])

    _RECIPES["cholesky"] = recipe._replace(value=value)
    try:
        yield
    finally:
        _RECIPES["cholesky"] = recipe


def first(out: object) -> Tensor:
    """The output, or the first of several."""
    return out[0] if isinstance(out, tuple) else out


def call(module: nn.Module, x: Tensor) -> Tensor:
    """The module's output; torch's attention layer is called as self-attention."""
    if isinstance(module, nn.MultiheadAttention):
        return first(module(x, x, x, need_weights=False))
    return first(module(x))


def _sorted_pairs(x: Tensor) -> Tensor:
    """MaxMin by its definition: an autograd.Function, as the layer has it, is not seen by a mode."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([torch.maximum(a, b), torch.minimum(a, b)], dim=-1)


class Effective:
    """The effective function of a module of a dtype, from float64 to float64, differentiable twice.

    Attributes:
        claim: the dtype that the last output that was not replayed would have had.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype
        self.tapes: dict[torch.Size, Tape] = {}

    def __call__(self, x: Tensor) -> Tensor:
        x = x.double() * 1.0
        with torch.enable_grad() if x.requires_grad else torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            tape = self.tapes.get(x.shape)
            if tape is None or not tape.replays:
                return self._record(x)
            return tape.run(x)

    def _record(self, x: Tensor) -> Tensor:
        tape = Tape()
        tape.add(x, self.dtype)
        with (
            torch.enable_grad(),
            ExactActivations(tape),
            mock.patch.object(_SortPairs, "apply", _sorted_pairs),
        ):
            out = call(self.module, x)
        self.claim, tape.out = out.claim, out.slot
        tape.held = []
        self.tapes[x.shape] = tape
        return out


def jacobians(fn: Callable[[Tensor], Tensor], x: Tensor, axis: int, seed_scale: float = 1.0) -> Tensor:
    """Jacobians (K, n_out, n_in) of a function that treats the K entries of x's ``axis`` apart."""
    x = x.detach().requires_grad_()
    rows = fn(x).movedim(axis, 0)
    rows = rows.reshape(len(rows), -1)  # not flatten: an entry may have become one number
    count = rows.shape[1]
    eye = torch.eye(count, dtype=rows.dtype) * seed_scale
    seeds = eye[:, None].expand(count, *rows.shape)
    (grads,) = torch.autograd.grad(rows, x, seeds, is_grads_batched=True, allow_unused=True)
    if grads is None:
        return torch.zeros(x.shape[axis], count, x[0].numel(), dtype=torch.float64)
    return grads.movedim(axis + 1, 0).flatten(2)


def scaled(matrices: Tensor, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """A norm of matrices (K, m, n) whose squares could overflow or vanish."""
    top = matrices.abs().amax((1, 2)).clamp_min(1e-300)
    return measure(matrices / top[:, None, None]) * top


def l2_gain(jacobian: Tensor) -> Tensor:
    """Spectral norms, (K, m, n) -> (K,)."""
    return torch.linalg.matrix_norm(jacobian, 2)


def linf_gain(jacobian: Tensor) -> Tensor:
    """Largest absolute row sums."""
    return jacobian.abs().sum(2).amax(1)


def token_gain(jacobian: Tensor, width_out: int, width_in: int) -> Tensor:
    """From below: the longest output token for input tokens of length one, by alternating ascent."""
    k, m, n = jacobian.shape
    blocks = jacobian.reshape(k, m // width_out, width_out, n // width_in, width_in)
    # Rows of one output token by each of its own directions: the ascent starts at the longest.
    start = torch.linalg.vector_norm(blocks, dim=-1).sum(-1).argmax(-1)  # (K, tokens out)
    u = F.one_hot(start, width_out).to(jacobian.dtype)
    for _ in range(6):
        e = torch.einsum("kiajb,kia->kijb", blocks, u)
        e = e / torch.linalg.vector_norm(e, dim=-1, keepdim=True).clamp_min(1e-300)
        v = torch.einsum("kiajb,kijb->kia", blocks, e)
        size = torch.linalg.vector_norm(v, dim=-1)
        u = v / size[..., None].clamp_min(1e-300)
    return size.amax(1)


def self_gain(jacobian: Tensor, width_out: int, width_in: int) -> Tensor | None:
    """Largest spectral norm of a token's effect on itself; None if tokens do not correspond."""
    k, m, n = jacobian.shape
    if m // width_out != n // width_in:
        return None
    blocks = jacobian.reshape(k, m // width_out, width_out, n // width_in, width_in)
    own = torch.diagonal(blocks, dim1=1, dim2=3).movedim(-1, 1)  # (K, tokens, out, in)
    return torch.linalg.matrix_norm(own, 2).amax(1)


def gain(jacobian: Tensor, norm: str, width_out: int, width_in: int) -> Tensor | None:
    """Gains (K,) of Jacobians in a norm, from below in "token"; tokens have the widths given."""
    if norm == "self" and jacobian.shape[1] // width_out != jacobian.shape[2] // width_in:
        return None
    measure: dict[str, Callable[[Tensor], Tensor]] = {
        "l2": l2_gain,
        "linf": linf_gain,
        "token": lambda j: token_gain(j, width_out, width_in),
        "self": lambda j: self_gain(j, width_out, width_in),
    }
    return scaled(jacobian, measure[norm])


def unit(rows: Tensor) -> Tensor:
    """Rows (K, n) of length one; those that are nearly or not at all numbers become zero."""
    top = rows.abs().amax(1, keepdim=True)
    rows = torch.where((top > 1e-290) & top.isfinite(), rows / top, 0.0)
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1.0)


def ascended(
    fn: Callable[[Tensor], Tensor], x: Tensor, axis: int, jacobian: Tensor, steps: int
) -> Tensor:
    """Inputs moved for a few steps towards larger spectral norms of the Jacobian."""
    u, _, vh = torch.linalg.svd(jacobian / jacobian.abs().amax((1, 2), keepdim=True).clamp_min(1e-300))
    shape = x.movedim(axis, 0).shape
    v = vh[:, 0].reshape(shape).movedim(0, axis)
    size = torch.linalg.vector_norm(x.movedim(axis, 0).flatten(1), dim=1).clamp_min(1e-3)
    for step in range(steps):
        x = x.detach().requires_grad_()
        out = fn(x)
        left = u[:, :, 0].reshape(out.movedim(axis, 0).shape).movedim(0, axis)
        (pull,) = torch.autograd.grad(out, x, left, create_graph=True, allow_unused=True)
        if pull is None or not pull.requires_grad:
            return x.detach()
        (grad,) = torch.autograd.grad((pull * v).sum(), x, allow_unused=True)
        if grad is None or not bool(torch.isfinite(grad).all()):
            return x.detach()
        move = unit(grad.movedim(axis, 0).flatten(1)) * (0.3 / (1 + step)) * size[:, None]
        x = x.detach() + move.reshape(shape).movedim(0, axis)
    return x


def farthest(
    fn: Callable[[Tensor], Tensor], x: Tensor, delta: Tensor, steps: int = 6, starts: int = 2
) -> Tensor:
    """The longest way (B,) that outputs were seen to go for inputs (B, *) within delta (B,)."""
    with torch.no_grad():
        base = fn(x)
    best = torch.zeros(len(x), dtype=torch.float64)

    def on_sphere(move: Tensor) -> Tensor:
        return (unit(move.flatten(1)) * delta[:, None] * (1 - 1e-12)).reshape(x.shape)

    for _ in range(starts):
        move = on_sphere(torch.randn_like(x))
        for _ in range(steps):
            point = (x + move).requires_grad_()
            way = torch.linalg.vector_norm((fn(point) - base).flatten(1), dim=1)
            best = torch.maximum(best, way.detach().nan_to_num(0.0))
            if not way.requires_grad:
                break
            (grad,) = torch.autograd.grad(way.sum(), point)
            grad = grad.nan_to_num(0.0)
            flat = grad.flatten(1).abs().amax(1)
            if not bool((flat > 0).any()):
                break
            move = on_sphere(move + on_sphere(grad))
        with torch.no_grad():
            way = torch.linalg.vector_norm((fn(x + move) - base).flatten(1), dim=1)
            best = torch.maximum(best, way.nan_to_num(0.0))
    return best
