"""How a module's bound is found: by the rule of its class, composed as modules compose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lipformer.certificate.certificate import Certificate, NotCertifiable
from lipformer.certificate.paths import Passage, behind, in_turn, scaled, total
from lipformer.certificate.rules import Rules, kind_of
from lipformer.functional import spectral_norm_bound
from lipformer.functional.rounding import DTYPES, FLOOR, ROUND_UP
from lipformer.functional.tracing import tracing

KEPT: Literal["kept"] = "kept"
"""Of an output: as many tokens, or dimensions, as the input has."""

Count = int | Literal["kept"] | None


@dataclass(frozen=True)
class Bound:
    """A bound while it is being composed; a tensor keeps its gradient.

    Attributes:
        value: the bound, a float or a scalar tensor.
        theorem: where it comes from.
        parts: the bounds it was composed from.
        path: filled in by the registry.
        kind: filled in by the registry.
        tokens: the most tokens that the output has: KEPT (the default: as the parts do, one after
            another), a number, or None if that is not known.
        dims: the output's number of dimensions, likewise; not needed unless tokens change.
        passage: what the module makes of the paths to its input, where more is known than the bound;
            for :attr:`Ask.follows` alone.
    """

    value: float | Tensor
    theorem: str = "rule of the module"
    parts: tuple[Bound, ...] = ()
    path: str = ""
    kind: str = ""
    tokens: Count = KEPT
    dims: Count = KEPT
    passage: Passage | None = None


@dataclass(frozen=True)
class Ask:
    """The question to a rule: a bound in this norm, for sequences of at most this length.

    Attributes:
        norm: "l2", "token", "self" or "linf".
        seq_len: the largest number of tokens, or None if the caller gave none.
        path: where the module stands in the model.
        kind: the module's class.
        in_forward: asked within a forward pass, by Contractive: dropout is as in eval mode, values
            on a device are not read, and checks of the constructor are not repeated.
        known: weights and their spectral norms, given beforehand or found while answering, so that each
            is computed once for all norms; None to remember nothing.
        alone: the bound must hold for each sample alone; the first dimension is that of the samples.
        dims: with ``alone``, the number of dimensions of the input, or None if it is not known.
        padded: whether a mask may mark tokens as padded.
    """

    norm: str
    seq_len: int | None = None
    path: str = ""
    kind: str = ""
    in_forward: bool = False
    known: list[tuple[Tensor, Tensor]] | None = None
    alone: bool = False
    dims: int | None = None
    padded: bool = True

    @property
    def follows(self) -> bool:
        """Whether paths are followed (docs/theory, section 4): in the l2 norm, not in forward passes."""
        return self.norm == "l2" and not self.in_forward and not tracing()

    def spectral_norm(self, weight: Tensor) -> Tensor:
        """An upper bound on the spectral norm of ``weight`` (m, n), a float64 scalar."""
        for other, norm in self.known or ():
            if other is weight:
                return norm
        norm = spectral_norm_bound(weight).double()
        if self.known is not None:
            self.known.append((weight, norm))
        return norm

    def readable(self, tensor: Tensor) -> bool:
        """Whether values may be read: not in a graph, nor off the CPU within a forward pass."""
        return not tracing() and (tensor.device.type == "cpu" or not self.in_forward)

    def child(self, module: nn.Module, name: str) -> Bound:
        """The bound of a child module under the same question."""
        path = f"{self.path}.{name}" if self.path else name
        return bound_of(module, replace(self, path=path))

    def in_turn(self, rules: Iterable[Callable[[Ask], Bound]], *, directly: bool = False) -> Bound:
        """The product of the bounds of parts that run in turn, each for the tokens that reach it.

        Args:
            rules: of the parts, in the order in which they run.
            directly: nothing at all happens between them: paths may be followed through them.
        """
        ask, parts = self, []
        for rule in rules:
            part = rule(ask)
            parts.append(part)
            if part.tokens != KEPT:
                ask = replace(ask, seq_len=part.tokens)
            if part.dims != KEPT:
                ask = replace(ask, dims=part.dims)
        return _added_up(linked(times(*parts))) if directly else times(*parts)

    def along(self, dim: int) -> None:
        """Refuses a module that works along a dimension if that may be the one of the samples.

        Args:
            dim: the first dimension that it works along.
        """
        if self.alone and (dim if dim >= 0 else (self.dims or 0) + dim) <= 0:
            known = "an unknown number of" if self.dims is None else self.dims
            raise self.refuse(
                f"it works along dimension {dim} of {known} dimensions, so that samples may influence "
                "each other",
                "tokens (B, N, D), batch_first=True, and no reshaping of the first dimension",
            )

    def refuse(self, reason: str, instead: str) -> NotCertifiable:
        """The exception for a module without a bound: ``raise ask.refuse(...)``."""
        return NotCertifiable(self.path, self.kind, reason, instead)

    def only(self, *norms: str, instead: str = "norm='l2'") -> None:
        """Refuses unless the norm is one of ``norms``."""
        if self.norm not in norms:
            raise self.refuse(f"it has no bound in the {self.norm} norm", instead)


_Rule = Callable[..., "Bound | float | Tensor"]
_R = TypeVar("_R", bound=_Rule)
bound_rules: Rules[_Rule] = Rules("bound", "lipformer.register_bound")


def register_bound(module_class: type[nn.Module]) -> Callable[[_R], _R]:
    """Decorator that registers the bound of a module class for :func:`lipformer.certify`.

    The rule gets the module and an :class:`Ask` and returns an upper bound on the module's
    Lipschitz constant in ``ask.norm``: a number, a scalar tensor (through which gradients flow, for
    :class:`Contractive`) or a :class:`Bound` with parts. ``ask.child(module, name)`` bounds a
    submodule, ``ask.in_turn`` several that run one after another. A module whose output has another
    number of tokens than its input returns ``Bound(..., tokens=n)``, or ``tokens=None``. A rule serves
    subclasses too, as long as they keep the class's ``forward`` and the methods that it calls.

    Example:
        >>> class Halve(nn.Module):
        ...     def forward(self, x):
        ...         return x / 2
        >>> @register_bound(Halve)
        ... def _(module, ask):
        ...     return 0.5
        >>> import lipformer as lf
        >>> lf.certify(Halve()).bound
        0.5
    """
    return bound_rules.register(module_class)


def bound_of(module: nn.Module, ask: Ask) -> Bound:
    """The bound of a module by its class's rule, composed but not yet rounded to a float."""
    ask = replace(ask, kind=kind_of(module))
    found = bound_rules.of(module, ask.refuse)(module, ask)
    bound = found if isinstance(found, Bound) else Bound(found)
    _check_value(bound.value, ask.kind)
    value = bound.value.double().reshape(()) if isinstance(bound.value, Tensor) else float(bound.value)
    if isinstance(value, Tensor) and not ask.in_forward and not tracing():
        value = float(value)  # a float, of which products can be taken without underflow
    tokens = _last(bound.tokens, (part.tokens for part in bound.parts))
    dims = _last(bound.dims, (part.dims for part in bound.parts))
    if dims == KEPT and tokens != KEPT:
        dims = None
    if bound.kind:  # a rule that answers with the bound of a child need not run the child alone
        bound = replace(bound, passage=None)
    return replace(bound, value=value, path=ask.path, kind=ask.kind, tokens=tokens, dims=dims)


def _last(own: Count, parts: Iterable[Count]) -> Count:
    """The module's own statement, else that of the last of its parts that changes something."""
    return own if own != KEPT else next((p for p in reversed([*parts]) if p != KEPT), KEPT)


def _check_value(value: object, kind: str) -> None:
    """Raises unless a rule returned a number that can be a bound."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number and not (isinstance(value, Tensor) and value.numel() == 1):
        raise TypeError(
            f"the rule of {kind} must return a number, a scalar tensor or a Bound, got {value!r}"
        )
    if number and not value >= 0:  # type: ignore[operator]
        raise ValueError(f"the rule of {kind} must return a bound >= 0, got {value!r}")


def check_tensors(module: nn.Module) -> None:
    """Refuses a module some of whose numbers are not there, not real or not finite."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            raise NotCertifiable(name, "tensor", "it has no values yet", "a module with its weights")
        if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype not in DTYPES):
            raise NotCertifiable(
                name, "tensor", f"no bound is known for {tensor.dtype}", ", ".join(map(str, DTYPES))
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NotCertifiable(name, "tensor", "it is not finite", "finite weights")


def check_seq_len(seq_len: int | None) -> None:
    """Raises unless ``seq_len`` is None or a positive int."""
    if seq_len is not None and (
        isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 1
    ):
        raise ValueError(f"seq_len must be None or an integer >= 1, got {seq_len!r}")


def answer(module: nn.Module, ask: Ask) -> Certificate:
    """The certificate of a module under any question."""
    check_tensors(module)
    norm, seq_len = ask.norm, ask.seq_len
    bound = bound_of(module, ask)
    limits = [limit for part in module.modules() if (limit := getattr(part, "max_len", None))]
    seq_len = min(limits, default=None) if seq_len is None else seq_len
    domain = "for every input" if seq_len is None else f"for every input of at most {seq_len} tokens"
    return finish(bound, norm, seq_len, domain)


def finish(bound: Bound, norm: str, seq_len: int | None, domain: str, parent: str = "") -> Certificate:
    """The certificate of a bound and its parts; refuses one that is not finite."""
    value = float(bound.value)
    # A rule's own intermediate results have no module of their own: they stand at their parent's.
    path = bound.path or parent
    if not (0.0 <= value < math.inf):
        raise NotCertifiable(
            path,
            bound.kind,
            f"its bound is {value}",
            "finite weights, or a rule that returns a finite bound",
        )
    return Certificate(
        bound=value,
        norm=norm,
        domain=domain,
        seq_len=seq_len,
        path=path,
        kind=bound.kind,
        theorem=bound.theorem,
        parts=tuple(finish(part, norm, seq_len, domain, path) for part in bound.parts),
    )


def times(*parts: Bound, theorem: str = "composition") -> Bound:
    """Lip(f o g) <= Lip(f) Lip(g)  (docs/theory, section 4).

    All parts were asked for the same number of tokens: where one may change it, Ask.in_turn.
    """
    return Bound(product_up(part.value for part in parts), theorem, parts)


def linked(bound: Bound) -> Bound:
    """The bound of parts that run in turn, nothing between them, with what they make of paths."""
    if all(part.passage is None for part in bound.parts):
        return bound
    return replace(bound, passage=in_turn([passage_of(part) for part in bound.parts]))


def _added_up(bound: Bound) -> Bound:
    """A bound by the sum over paths, if they are known and that is smaller (section 4)."""
    if bound.passage is None:
        return bound
    added = float(total(bound.passage(behind(torch.ones((), dtype=torch.float64)))))
    return replace(bound, value=added, theorem="sum over paths") if added < bound.value else bound


def passage_of(bound: Bound) -> Passage:
    """What a module makes of paths: with nothing but a constant it sees their sizes alone."""
    if bound.passage is not None:
        return bound.passage
    factor = float(bound.value)
    return lambda paths: scaled(behind(total(paths)), factor)


def weighted_sum(weights: tuple[float, ...], parts: tuple[Bound | None, ...], theorem: str) -> Bound:
    """Lip(a f + b g) <= |a| Lip(f) + |b| Lip(g); None stands for the identity (section 4)."""
    value: float | Tensor = 0.0
    for weight, part in zip(weights, parts, strict=True):
        term = product_up((abs(float(weight)), 1.0 if part is None else part.value))
        value = add_up(value, term)
    return Bound(value, theorem, tuple(part for part in parts if part is not None))


def product_up(factors: Iterable[float | Tensor]) -> float | Tensor:
    """A product of numbers >= 0, rounded up, and never zero unless a factor is.

    Of floats it is taken with exponents of its own, so that no order of tiny and huge factors loses it;
    of tensors, whose values are not read, each partial product is kept above FLOOR. Times one is
    exact, so that constants of one stay one.
    """
    number, tensor, exponent = 1.0, None, 0
    for factor in factors:
        if isinstance(factor, Tensor):
            tensor = (
                factor
                if tensor is None
                else torch.addcmul(factor.new_full((), FLOOR), tensor, factor, value=ROUND_UP)
            )
        elif factor != 1.0 and not 0.0 < factor < math.inf:
            return factor if tensor is None else tensor * factor
        elif factor != 1.0:
            mantissa, power = math.frexp(factor)
            number, power_of_number = math.frexp(
                number * mantissa * (1.0 if number == 1.0 else ROUND_UP)
            )
            exponent += power + power_of_number
    try:
        number = math.ldexp(number, exponent)
    except OverflowError:
        number = math.inf
    number = max(number, FLOOR)
    if tensor is None:
        return number
    if number == 1.0:
        return tensor
    tensor = tensor * (number * ROUND_UP)
    return tensor if number >= 1.0 else _above_floor(tensor)


def _above_floor(tensor: Tensor) -> Tensor:
    # threshold, whose derivative is one kernel where that of clamp_min is three.
    return F.threshold(tensor, FLOOR, FLOOR)


def add_up(a: float | Tensor, b: float | Tensor) -> float | Tensor:
    """A sum rounded up, unless it is exact: the rounding error of two floats is itself a float."""
    total = a + b
    if isinstance(total, float):
        rest = total - a
        return total if (a - (total - rest)) + (b - rest) <= 0.0 else total * ROUND_UP
    return total * ROUND_UP
