r"""Bounds of torch's own operations, for :func:`lipformer.certify` with an example.

Values that depend on the input x carry a constant L of the map from x to them. Dimension 0 counts
samples: an operation along it has no rule. For :math:`f, g` of constants :math:`L, L'`:

* :math:`f + g` has :math:`L + L'`; a constant term adds nothing, a constant factor c multiplies by
  :math:`\max|c|` (a diagonal matrix: the same in every norm);
* :math:`(f, g)` side by side has :math:`\sqrt{L^2 + L'^2}` in l2 and :math:`\max(L, L')` in linf, where
  tokens are put beside tokens also in the token norm;
* the mean of n entries has :math:`1/\sqrt n` in l2, their sum :math:`\sqrt n`, their maximum 1; in linf
  these are 1, n and 1, and for tokens of width D in the token norm 1, n and
  :math:`\sqrt{\min(n, D)}` (each feature takes the move of one token);
* a repetition of every entry n times has :math:`\sqrt n` in l2 and 1 in linf.

In the token norm a token is a vector along the last dimension, and what changes these vectors is
refused; in the self norm all that moves tokens is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from lipformer.certificate.activations import (
    GELU_SLOPE,
    GELU_TANH_SLOPE,
    MISH_SLOPE,
    SILU_SLOPE,
)
from lipformer.certificate.bounds import add_up, product_up
from lipformer.functional.norms import max_abs
from lipformer.functional.rounding import ROUND_UP, enlarge

aten = torch.ops.aten


class Followed(Tensor):
    """A value that depends on the input, while certify follows it: no entries of its own.

    Attributes:
        value: the value at the example.
        bound: of the map from the input to it; None if there is none, for the reason in ``why``.
        why: see ``bound``.
        born: when it was made, to know it from values that were written over since.
    """

    value: Tensor
    bound: float | None
    why: str
    born: int

    @staticmethod
    def __new__(cls, value: Tensor, bound: float | None, born: int, why: str = "") -> Followed:
        made = Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device
        )
        made.value, made.bound, made.born, made.why = value, bound, born, why
        return made

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Followed({tuple(self.shape)}, bound={self.bound})"

    # What is done to it must arrive at the dispatcher, where certify listens; elsewhere it is lost.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: object = (), kwargs: object = None
    ) -> object:
        raise RuntimeError(f"{func} was called on a value that certify follows, where it cannot look")


@dataclass(frozen=True)
class Step:
    """One operation: its arguments, those that are followed among them, and what it gave.

    Attributes:
        op: the operation.
        args: positional arguments.
        kwargs: the others.
        inputs: the followed ones.
        out: what it gave, the first of several.
        norm: of the question.
        refuse: makes the exception.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Followed]
    out: Tensor
    norm: str
    refuse: Callable[[str, str], Exception]

    @property
    def x(self) -> Tensor:
        """The one followed argument, which comes first."""
        return self.inputs[0]

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """An argument by place or name."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)

    def dim(self, index: int, name: str = "dim", default: int = 0) -> int:
        """A dimension of x, counted from the first."""
        return self.arg(index, name, default) % max(self.x.ndim, 1)

    def samples(self) -> Exception:
        """The refusal of an operation along the dimension of the samples."""
        return self.refuse(
            f"{tuple(self.x.shape)} -> {tuple(self.out.shape)} works along dimension 0, so that samples "
            "may influence each other",
            "samples in the first dimension, which nothing moves, merges or reduces; nn.Linear for "
            "F.linear, matmul and einsum",
        )

    def keep(self, tokens: bool, place: bool = False) -> None:
        """Refuses unless the vectors of the last dimension are kept, or in the self norm their place."""
        if self.norm == "self" and not place:
            raise self.refuse(
                "it moves or merges tokens, which have no bound in the self norm", "norm='l2'"
            )
        if self.norm == "token" and not tokens:
            raise self.refuse("it changes the tokens, which has no bound in the token norm", "norm='l2'")

    def spread(self, shape: Sequence[int]) -> float:
        """The constant of repeating a followed tensor of this shape to that of the output."""
        out = tuple(self.out.shape)
        if len(shape) != len(out) or shape[:1] != out[:1]:
            raise self.samples()
        times = [b // a if a else 1 for a, b in zip(shape, out, strict=True)]
        if self.norm == "self" and math.prod(times[:-1]) > 1:
            self.keep(False)
        return _root(1 if self.norm == "linf" else times[-1] if self.norm != "l2" else math.prod(times))


def _root(n: int) -> float:
    """The root of an integer, rounded up unless it is exact."""
    root = math.isqrt(n)
    return float(root) if root * root == n else math.sqrt(n) * ROUND_UP


def _as_taken(constant: Any, out: Tensor) -> list[Tensor]:
    """A constant's entries in float64: as they are, and rounded as the operation may take them."""
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    entries = constant if isinstance(constant, Tensor) else torch.tensor(constant, dtype=torch.float64)
    return [entries.to(dtype).double() for dtype in (torch.float64, wide, out.dtype)]


def size_of(constant: Any, out: Tensor) -> float:
    """The largest size of a constant's entries in an operation that gives ``out``."""
    return max(float(max_abs(entries)) for entries in _as_taken(constant, out))


# --- one followed argument: a factor ----------------------------------------------------------


def _slope(value: float) -> Callable[[Step], float]:
    return lambda step: value


def _leaky(step: Step) -> float:
    return max(1.0, size_of(step.arg(1, "negative_slope", 0.01), step.out))


def _gelu(step: Step) -> float:
    return GELU_SLOPE if step.arg(1, "approximate", "none") == "none" else GELU_TANH_SLOPE


def _same_order(step: Step) -> float:
    """A view: entries keep their order, so that equal last dimensions are the same vectors."""
    before, after = step.x.shape, step.out.shape
    if step.x.dtype != step.out.dtype:
        raise step.refuse("it reinterprets the bits of its input", "x.to(dtype)")
    if before[:1] != after[:1]:
        raise step.samples()
    step.keep(before[-1] == after[-1] and min(len(before), len(after)) > 1, before == after)
    return 1.0


def _permuted(step: Step) -> float:
    n = step.x.ndim
    order = list(range(n))
    if step.op.overloadpacket is aten.permute:
        order = [d % n for d in step.arg(1, "dims")]
    else:
        i, j = (0, 1) if step.op.overloadpacket is aten.t else (step.dim(1, "dim0"), step.dim(2, "dim1"))
        order[i], order[j] = order[j], order[i]
    if order[0] != 0:
        raise step.samples()
    step.keep(order[-1] == n - 1, order == list(range(n)))
    return 1.0


def _flipped(step: Step) -> float:
    place = 2 if step.op.overloadpacket is aten.roll else 1
    dims = {d % step.x.ndim for d in step.arg(place, "dims", ())}
    if not dims or 0 in dims:
        raise step.samples()
    step.keep(True, dims == {step.x.ndim - 1})
    return 1.0


def _taken(step: Step) -> float:
    """Some of the entries along a dimension: select and unbind take the dimension away."""
    if step.out.shape == step.x.shape:
        return 1.0
    removes = step.op.overloadpacket in (aten.select, aten.unbind)
    place = 1 if step.op.overloadpacket in (aten.select, aten.slice, aten.unbind) else 2
    dim = step.dim(place)
    if dim == 0:
        raise step.samples()
    last = dim == step.x.ndim - 1
    step.keep(not (last and removes), last and not removes)
    return 1.0


def _reduced(step: Step) -> float:
    given = step.arg(1, "dim")
    listed = given if isinstance(given, list) else [given] if isinstance(given, int) else []
    dims = {d % max(step.x.ndim, 1) for d in listed}
    if not dims or 0 in dims:
        raise step.samples()
    step.keep(step.x.ndim - 1 not in dims)
    n = math.prod(step.x.shape[d] for d in dims)
    kind = step.op.overloadpacket
    if step.norm == "linf":
        return float(n) if kind is aten.sum else 1.0
    if step.norm == "token":
        return (
            float(n)
            if kind is aten.sum
            else 1.0
            if kind is aten.mean
            else _root(min(n, step.x.shape[-1]))
        )
    return _root(n) if kind is aten.sum else ROUND_UP / math.sqrt(n) if kind is aten.mean else 1.0


def _repeated(step: Step) -> float:
    if step.op.overloadpacket is aten.repeat and len(step.arg(1, "repeats")) != step.x.ndim:
        raise step.samples()
    return step.spread(step.x.shape)


def _softmax(step: Step) -> float:
    dim = step.dim(1)
    if dim == 0:
        raise step.samples()
    last = dim == step.x.ndim - 1
    step.keep(last, last)
    return 0.5  # in every l_p


def _padded(step: Step) -> float:
    pad = step.arg(1, "pad")
    if len(pad) >= 2 * step.x.ndim and any(pad[2 * step.x.ndim - 2 :]):
        raise step.samples()
    step.keep(True, not any(pad[2:]))
    return 1.0


def _column_sum(n: int, out: int) -> Fraction:
    """The largest column sum of adaptive average pooling of n entries to ``out`` of them."""
    columns = [Fraction(0)] * n
    for i in range(out):
        start, end = i * n // out, -(-(i + 1) * n // out)
        for k in range(start, end):
            columns[k] += Fraction(1, end - start)
    return max(columns, default=Fraction(1))


def _adaptive(step: Step) -> float:
    """Schur's test: rows sum to one."""
    step.keep(False)
    if step.norm == "linf":
        return 1.0
    sums = [_column_sum(a, b) for a, b in zip(step.x.shape[-2:], step.out.shape[-2:], strict=True)]
    return math.sqrt(sums[0] * sums[1]) * ROUND_UP**2


def _filled(step: Step) -> float:
    return step.spread(step.x.shape)


FACTORS: dict[Any, Callable[[Step], float]] = {
    **dict.fromkeys((aten.clone, aten.detach, aten.alias, aten._to_copy, aten.lift_fresh), _slope(1.0)),
    **dict.fromkeys((aten.neg, aten.abs, aten.relu, aten.tanh, aten.hardtanh), _slope(1.0)),
    **dict.fromkeys((aten.clamp, aten.clamp_min, aten.clamp_max), _filled),
    aten.sigmoid: _slope(0.25),
    aten.silu: _slope(SILU_SLOPE),
    aten.mish: _slope(MISH_SLOPE),
    aten.hardswish: _slope(1.5),
    aten.leaky_relu: _leaky,
    aten.gelu: _gelu,
    aten._softmax: _softmax,
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.squeeze, aten.unsqueeze), _same_order),
    **dict.fromkeys((aten.permute, aten.transpose, aten.t), _permuted),
    **dict.fromkeys((aten.flip, aten.roll), _flipped),
    **dict.fromkeys((aten.select, aten.slice, aten.unbind, aten.split, aten.split_with_sizes), _taken),
    **dict.fromkeys((aten.mean, aten.sum, aten.amax, aten.amin, aten.max, aten.min), _reduced),
    **dict.fromkeys((aten.expand, aten.repeat), _repeated),
    aten.masked_fill: _filled,
    aten.constant_pad_nd: _padded,
    aten._adaptive_avg_pool2d: _adaptive,
}
"""The constant of an operation on its first argument, the only one that is followed."""


# --- several arguments: the constant of what they give ----------------------------------------


def _bound(operand: Any, step: Step, weight: float = 1.0) -> float:
    """Of an argument as it enters the output: 0 if it is a constant."""
    if not isinstance(operand, Followed):
        return 0.0
    assert operand.bound is not None
    return float(product_up((operand.bound, weight, step.spread(operand.shape))))


def total(values: Sequence[float]) -> float:
    """A sum of bounds, rounded up."""
    found = 0.0
    for value in values:
        found = float(add_up(found, value))
    return found


def _beside(values: Sequence[float], largest: bool) -> float:
    """Of what stands side by side: the largest bound, or the root of the sum of their squares."""
    values = [value for value in values if value != 0.0]
    if largest or len(values) < 2:
        return max(values, default=0.0)
    return enlarge(math.hypot(*values), len(values))


def _sum(step: Step) -> float:
    weight = size_of(step.arg(2, "alpha", 1), step.out)
    first, second = step.args[:2]
    if step.op.overloadpacket is aten.rsub:
        first, second = second, first
    return total([_bound(first, step), _bound(second, step, weight)])


def _product(step: Step) -> float:
    first, second = step.args[:2]
    if len(step.inputs) > 1:
        raise step.refuse("the product of two values that both depend on the input has no bound", _KNOWN)
    constant, followed = (second, first) if isinstance(first, Followed) else (first, second)
    return _bound(followed, step, size_of(constant, step.out))


def _quotient(step: Step) -> float:
    first, second = step.args[:2]
    if isinstance(second, Followed) or step.kwargs.get("rounding_mode") is not None:
        raise step.refuse("division with rounding, or by a value of the input, has no bound", _KNOWN)
    least = min(float(entries.abs().min()) for entries in _as_taken(second, step.out))
    return _bound(first, step, ROUND_UP / least if least > 0 else math.inf)


def _joined(step: Step) -> float:
    parts = step.arg(0, "tensors")
    dim = step.arg(1, "dim", 0) % step.out.ndim
    stacked = step.op.overloadpacket is aten.stack
    if dim == 0 or any(p.shape[:1] != step.out.shape[:1] for p in parts if isinstance(p, Followed)):
        raise step.samples()
    last = dim == step.out.ndim - 1
    step.keep(not (last and stacked), last and not stacked)
    bounds = [p.bound or 0.0 for p in parts if isinstance(p, Followed)]
    return _beside(bounds, step.norm == "linf" or (step.norm == "token" and not last))


def _chosen(step: Step) -> float:
    condition, first, second = step.args
    if isinstance(condition, Followed):
        raise step.refuse("a choice by a value that depends on the input has no bound", _KNOWN)
    return _beside([_bound(first, step), _bound(second, step)], step.norm == "linf")


JOINS: dict[Any, Callable[[Step], float]] = {
    **dict.fromkeys((aten.add, aten.sub, aten.rsub), _sum),
    aten.mul: _product,
    aten.div: _quotient,
    **dict.fromkeys((aten.cat, aten.stack), _joined),
    aten.where: _chosen,
}
"""The constant of an operation's result as a function of the model's input."""

CONSTANTS = {
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like,
    aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty,
}  # fmt: skip
"""What reads the shape of its argument alone."""

_KNOWN = (
    "modules with a bound, sums, constant factors, means, sums and maxima over tokens, reshapes, "
    "concatenations and activations"
)


def constant_of(step: Step) -> tuple[float, float]:
    """The factor of an operation, or its result's constant, and that constant again.

    Raises:
        step.refuse(reason, instead): the operation has no rule, or none for these arguments.
    """
    kind = step.op.overloadpacket
    first = step.args[0] if step.args else None
    alone = len(step.inputs) == 1 and first is step.inputs[0]
    rule = JOINS.get(kind) or (FACTORS.get(kind) if alone else None)
    if rule is None:
        instead = "lipformer.convert_attention(model)" if "attention" in kind.__name__ else _KNOWN
        raise step.refuse(f"the operation {kind} has no bound", instead)
    if not step.out.is_floating_point():
        raise step.refuse(f"{kind} gives {step.out.dtype}, which has no Lipschitz constant", _KNOWN)
    factor = value = rule(step)
    if kind not in JOINS:
        assert step.inputs[0].bound is not None
        value = float(product_up((step.inputs[0].bound, factor)))
    if not math.isfinite(value):
        raise step.refuse(f"the bound of {kind} is {value}", "finite constants, and divisors not zero")
    return factor, value
