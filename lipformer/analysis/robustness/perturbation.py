"""How far the output of a network can move when its input moves: LoFAST's bound through modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from lipformer.analysis.inputs import check_samples, radii, refuse_autocast
from lipformer.analysis.maps import HasAttentionMaps, attention_maps
from lipformer.analysis.robustness.l2_modulus import l2_modulus
from lipformer.analysis.robustness.lofast import Modulus, lofast_modulus
from lipformer.analysis.robustness.lofast_terms import EXACT
from lipformer.certificate import Ask, Certificate, NotCertifiable
from lipformer.certificate.bounds import answer, bound_of
from lipformer.certificate.paths import (
    Passage,
    Paths,
    behind,
    beside,
    in_turn,
    then_scaled,
    total,
)
from lipformer.certificate.rules import Rules, kind_of
from lipformer.certificate.torch_rules import chain, parts_of
from lipformer.flows import InvertibleResidual, InvertibleSequential
from lipformer.functional.rounding import FLOOR, ROUND_UP, UNIT, enlarge
from lipformer.functional.wide import NotWide, Wide, plain
from lipformer.layers import (
    BallProjection,
    Contractive,
    ConvexResidual,
    L2MultiheadAttention,
    Residual,
    TokenMean,
)
from lipformer.layers.branch import apart, call_branch
from lipformer.layers.per_head import divided_part
from lipformer.layers.residual import same_shape
from lipformer.layers.scaled import FirstOutput, Scaled
from lipformer.models import EncoderClassifier, LanguageModel, VisionTransformer

Rule = Callable[[nn.Module, Tensor], "tuple[Tensor, Modulus]"]
_R = TypeVar("_R", bound=Callable[..., "tuple[Tensor, Modulus]"])
_rules: Rules[Rule] = Rules("modulus", "lipformer.analysis.register_perturbation")


def register_perturbation(module_class: type[nn.Module]) -> Callable[[_R], _R]:
    """Decorator that registers a module class for :func:`perturbation_bound`.

    The rule gets the module and x (B, *) in float64, which a module in less than float64 takes as if it
    were of its dtype (:class:`~lipformer.functional.wide.Wide`; ``plain(x)`` is an ordinary tensor). It
    returns the output and its modulus at x: a
    function that takes bounds of the perturbation of each sample of x, (B,) in float64, to bounds of
    that of the output, and grows with them. :class:`Named` says what certificates call it. It serves
    subclasses that keep the class's ``forward``.
    Classes without a rule need none if :func:`lipformer.certify` has a bound for them.
    """
    return _rules.register(module_class)


class Named:
    """A modulus with a name: what certificates say where it is smaller than the global bound.

    Beside it, for networks that follow paths (docs/theory, section 4), what the module makes of them, if
    that is more than the modulus tells.
    """

    def __init__(self, modulus: Modulus, theorem: str, passage: Passage | None = None) -> None:
        self.modulus, self.theorem, self._passage = modulus, theorem, passage

    def __call__(self, delta: Tensor) -> Tensor:
        """(B,) -> (B,)."""
        return plain(self.modulus(delta))

    def passage(self, paths: Paths) -> Paths:
        """The paths behind the module."""
        return behind(self(total(paths))) if self._passage is None else self._passage(paths)


class Step(Named):
    """The modulus of a module at an input: the smaller of its local and its global bound.

    Attributes:
        kind: the module's class.
        whole: its global certificate, or None if it has none.
        parts: the steps of its children by name, those that its rule followed.
        skips: whether it is or holds a residual whose paths are followed.
        seen: what it was last asked and answered, (B,) each, and where the local bound was smaller.
    """

    def __init__(
        self, kind: str, local: Modulus | None, whole: Certificate | None, passage: Passage | None = None
    ) -> None:
        # A rule that answers with the step of a part need not run the part alone.
        if isinstance(local, Named) and not isinstance(local, Step):
            passage = local.passage
        super().__init__(local or torch.clone, getattr(local, "theorem", "local modulus"), passage)
        self.kind, self.local, self.whole = kind, local, whole
        self.skips = False
        self.parts: list[tuple[str, Step]] = []
        self.seen: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, delta: Tensor) -> Tensor:
        """(B,) -> (B,)."""
        found = torch.full_like(delta, torch.inf) if self.local is None else super().__call__(delta)
        nearer = torch.ones_like(delta, dtype=torch.bool)
        if self.whole is not None:
            constant = times(self.whole.bound)(delta)
            nearer, found = found < constant, torch.minimum(found, constant)
        self.seen = delta, found, nearer
        return found


@torch.no_grad()
def perturbation_bound(module: nn.Module, x: Tensor, delta: float | Tensor) -> tuple[Tensor, Tensor]:
    r"""Returns a module's output at x and a bound on its change within :math:`\|x' - x\| \le \delta`.

    Norms are l2 over all entries of a sample: Frobenius over its tokens, or over the pixels of an image.
    The bound goes through the modules one by one, each at the value that x has there:

    * dot-product attention by :func:`lofast_bound`, in a residual connection together with it;
    * L2 attention by Theorem L, also divided by its bound (:class:`~lipformer.Contractive`);
    * ``nn.LayerNorm`` by the least deviation of a token from its mean;
    * projections on a ball by 1, and by the diameter of what they can reach; the mean of n tokens by
      :math:`1/\sqrt n`;
    * ``nn.Sequential``, residual connections, wrappers and lipformer's models by their parts (a language
      model takes its embedded tokens here);
    * everything else by :func:`lipformer.certify`, whose constant is also used wherever it is smaller.

    In ``Residual(Sequential(BallProjection, attention))`` the norm of identity and attention together
    counts for a sample only if no token can leave the ball, :math:`\|x_i\| + \delta \le R`; else
    :math:`\delta` and the bound of the branch are added.

    Computed in float64 (a float32 module is copied), for exact arithmetic with the weights that the
    module multiplies by in its own dtype (docs/certificates, "The function").

    Args:
        module: modules with a rule here or a global certificate.
        x: (B, N, D), (B, D) or images (B, C, H, W); samples do not influence each other.
        delta: a number or (B,).

    Returns:
        y in x's dtype, and (B,) in float64.

    Raises:
        NotCertifiable: some submodule has neither a rule nor a certificate, or dropout is on.

    Example:
        >>> from lipformer.layers import CenterNorm
        >>> y, moved = perturbation_bound(CenterNorm(3), torch.zeros(2, 5, 3), 0.1)
        >>> moved.tolist()
        [0.15, 0.15]
    """
    check_samples(x)
    radius = radii(delta, x.shape[:1], x.device, "delta")
    y, modulus = modulus_of(module, tokens_for(module, x))
    return plain(y).to(x.dtype), modulus(radius)


def tokens_for(module: nn.Module, x: Tensor) -> Tensor:
    """A copy of x in float64, at which a module is evaluated as the function that it is.

    For a module in less than float64 they are :class:`~lipformer.functional.wide.Wide`.
    """
    refuse_autocast(module)
    copied = x.detach().to(torch.float64, copy=True)
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), x.dtype)
    return copied if own == torch.float64 else Wide.of(copied, own)


def _run(module: nn.Module, x: Tensor) -> Tensor:
    """The module's output at x; refuses where that cannot be had in float64."""
    try:
        return call_branch(module, x)
    except NotWide as error:
        raise NotCertifiable(
            "", kind_of(module), f"it cannot be evaluated in float64: {error}", "module.double()"
        ) from error


_theorem_l: ContextVar[bool] = ContextVar("_theorem_l", default=True)


@contextmanager
def theorem_l_is(used: bool) -> Iterator[None]:
    """Where it is not used, L2 attention is bounded by its global constants alone: far less work."""
    before = _theorem_l.set(used)
    try:
        yield
    finally:
        _theorem_l.reset(before)


_open: ContextVar[list[tuple[str, Step]] | None] = ContextVar("_open", default=None)
"""The parts, so far, of the module whose rule is running."""


def modulus_of(module: nn.Module, x: Tensor) -> tuple[Tensor, Step]:
    """The output at x (B, *) and its modulus there (see :func:`register_perturbation`)."""
    rule = _rule_of(module)
    if rule is None:
        y, known = _run(module, x), _constant(module, x)
        return y, Step(kind_of(module), None, known, bound_of(module, _ask(x)).passage)
    parts: list[tuple[str, Step]] = []
    above = _open.set(parts)
    try:
        y, local = rule(module, x)
    finally:
        _open.reset(above)
    try:
        whole: Certificate | None = _bound(module, x)
    except NotCertifiable:
        # Not a fallback: the local bound is as certain, and a network of dot products has no other.
        whole = None
    step = Step(kind_of(module), local, whole)
    step.parts = parts
    step.skips = isinstance(module, InvertibleResidual) or any(part.skips for _, part in parts)
    return y, step


def _constant(module: nn.Module, x: Tensor) -> Certificate:
    """The global certificate of a module that is not looked into."""
    try:
        return _bound(module, x)
    except NotCertifiable as error:
        if not any(isinstance(part, nn.MultiheadAttention) for part in module.modules()):
            raise
        raise NotCertifiable(
            "",
            type(module).__name__,
            "the dot products inside it have no global constant, and local bounds do not follow this "
            "class: they go through nn.Sequential, lf.Residual and lf.ConvexResidual",
            "the same network of these, for example "
            "lf.Residual(lipformer.models.DotProductSelfAttention(dim, heads))",
        ) from error


def _rule_of(module: nn.Module) -> Rule | None:
    """The rule of a module's class, None if there is none; raises if it may not apply."""
    ask = Ask("l2", kind=kind_of(module))
    if isinstance(module, L2MultiheadAttention | Contractive) and not _theorem_l.get():
        return None
    rule = _rules.find(module, ask.refuse)
    if rule is None and isinstance(module, HasAttentionMaps):
        return _attention  # whose maps refuse what they do not know
    return rule


def _bound(module: nn.Module, x: Tensor) -> Certificate:
    """The global certificate of a module for each sample of x by itself."""
    return answer(module, _ask(x))


def _ask(x: Tensor) -> Ask:
    return Ask("l2", x.shape[1] if x.ndim == 3 else None, alone=True, dims=x.ndim, padded=False)


def times(constant: float) -> Modulus:
    """The modulus of a map with a Lipschitz constant, rounded up."""
    # Never zero where nothing is: a later factor may be as large as this one is small.
    floor = FLOOR if constant > 0 else 0.0
    return lambda delta: torch.where(delta > 0, (constant * delta * ROUND_UP).clamp_min(floor), delta)


def _child(module: nn.Module, name: str, x: Tensor) -> tuple[Tensor, Step]:
    """A part's output and modulus; a refusal names where the part stands."""
    try:
        y, step = modulus_of(module, x)
    except NotCertifiable as error:
        path = f"{name}.{error.path}" if error.path else name
        raise NotCertifiable(path, error.kind, error.reason, error.instead) from error
    parts = _open.get()
    if parts is not None:
        parts.append((name, step))
    return y, step


@register_perturbation(nn.Sequential)
@register_perturbation(InvertibleSequential)
def _in_turn(module: nn.Sequential, x: Tensor) -> tuple[Tensor, Modulus]:
    steps: list[Named] = []
    skips = False
    for name, child in parts_of(module).items():
        x, step = _child(child, name, x)
        steps.append(step)
        skips = skips or step.skips
    return x, _after_each_other(steps, "composition", skips)


def _after_each_other(steps: list[Named], theorem: str, skips: bool = False) -> Named:
    passage = in_turn([step.passage for step in steps])

    def modulus(delta: Tensor) -> Tensor:
        added = total(passage(behind(delta))) if skips else torch.inf
        for step in steps:  # last, since certificates show what the steps saw
            delta = step(delta)
        return delta.clamp_max(added)

    return Named(modulus, theorem, passage)


@register_perturbation(VisionTransformer)
@register_perturbation(LanguageModel)
@register_perturbation(EncoderClassifier)
def _(
    module: VisionTransformer | LanguageModel | EncoderClassifier, x: Tensor
) -> tuple[Tensor, Modulus]:
    y, body = _child(module.body, "body", x)
    return y, Named(body, "composition", body.passage)


@register_perturbation(FirstOutput)
def _(module: FirstOutput, x: Tensor) -> tuple[Tensor, Modulus]:
    y, inner = _child(module.module, "module", x)
    return y, Named(inner, inner.theorem, inner.passage)


@register_perturbation(Scaled)
def _(module: Scaled, x: Tensor) -> tuple[Tensor, Modulus]:
    _, inner = _child(module.module, "module", x)
    return _run(module, x), _scaled(inner, module.factor, "fixed factor")


def _scaled(inner: Named, factor: Tensor, theorem: str) -> Named:
    size = factor.detach().double().abs().amax() * ROUND_UP**2
    outer = times(float(size))
    return Named(lambda delta: outer(inner(delta)), theorem, then_scaled(inner.passage, size))


@register_perturbation(L2MultiheadAttention)
def _(module: L2MultiheadAttention, x: Tensor) -> tuple[Tensor, Modulus]:
    modulus, passage = l2_modulus(module, x)
    return _run(module, x), Named(modulus, "Theorem L", passage)


@register_perturbation(Contractive)
def _(module: Contractive, x: Tensor) -> tuple[Tensor, Modulus]:
    y, scales = _run(module, x), module.scales()
    if not scales.ndim:
        inner = modulus_of(module.module, x)[1]
        return y, _scaled(inner, scales, inner.theorem)
    ask = Ask("l2", kind=kind_of(module))
    divided = divided_part(module.module, ask)
    steps: list[Named] = []
    for part in chain(module.module, ask):
        if divided is not None and part is divided[0] and isinstance(part, L2MultiheadAttention):
            out = part.scaled(x, scales)
            modulus, passage = l2_modulus(part, x, scales)
            steps.append(Named(modulus, "Theorem L", passage))
        else:
            out, step = modulus_of(part, x)
            steps.append(step)
        x = out
    return y, _after_each_other(steps, "Theorem L")


@register_perturbation(TokenMean)
def _(module: TokenMean, x: Tensor) -> tuple[Tensor, Modulus]:
    r"""Of n tokens: :math:`\sqrt n / \max(n, n_0)`, where the global constant is for any number."""
    n = x.shape[1]
    return _run(module, x), Named(times(math.sqrt(n) / max(n, module.least) * ROUND_UP), f"mean of {n}")


@register_perturbation(BallProjection)
def _(module: BallProjection, x: Tensor) -> tuple[Tensor, Modulus]:
    y = module(x)
    lengths = torch.linalg.vector_norm(plain(y), dim=-1)
    reach = (lengths + module.radius)[:, None].flatten(1)  # (B, tokens): one where x is (B, D)
    widest = enlarge(torch.linalg.vector_norm(reach, dim=1))
    return y, Named(lambda delta: torch.minimum(delta, widest), "projection")


@register_perturbation(nn.LayerNorm)
def _(module: nn.LayerNorm, x: Tensor) -> tuple[Tensor, Modulus]:
    r"""A token's deviations v become :math:`\gamma \sqrt d\, v (|v|^2 + d \varepsilon)^{-1/2}`.

    The derivative has norm at most :math:`\max|\gamma| \sqrt d\, (|v|^2 + d \varepsilon)^{-1/2}`, and
    within delta every |v| stays above its own less delta.
    """
    Ask("l2", kind=kind_of(module), alone=True, dims=x.ndim).along(-len(module.normalized_shape))
    tokens = plain(x).flatten(x.ndim - len(module.normalized_shape))
    width = tokens.shape[-1]
    deviations = torch.linalg.vector_norm(tokens - tokens.mean(-1, keepdim=True), dim=-1)
    error = 8.0 * (width + 8) * UNIT * torch.linalg.vector_norm(tokens, dim=-1)
    least = (deviations - error)[:, None].flatten(1).amin(1)
    scale = 1.0 if module.weight is None else float(module.weight.detach().double().abs().max())

    def modulus(delta: Tensor) -> Tensor:
        inside = (least - delta).clamp_min(0.0).square() + width * module.eps
        return enlarge(delta * scale * math.sqrt(width) / inside.sqrt())

    return _run(module, x), Named(modulus, "least deviation of a token")


def _attention(module: nn.Module, x: Tensor) -> tuple[Tensor, Modulus]:
    return _attend(module, x), Named(lofast_modulus(module, plain(x)), "LoFAST")


def _attend(module: nn.Module, x: Tensor) -> Tensor:
    """The output of an attention module, which must be attention within samples and without dropout."""
    ask = Ask("l2", kind=type(module).__name__)
    dropout = getattr(module, "dropout", None)
    rate = dropout.p if isinstance(dropout, nn.Dropout) else dropout
    if module.training and rate:
        raise ask.refuse(f"dropout with p={rate} is random in training mode", "model.eval()")
    if not getattr(module, "batch_first", True):
        raise ask.refuse(
            "with batch_first=False samples are not the first dimension", "batch_first=True"
        )
    if x.ndim != 3:
        raise ValueError(f"{ask.kind} needs tokens (B, N, D), got shape {tuple(x.shape)}")
    if not isinstance(module, nn.MultiheadAttention):
        return _run(module, x)
    # torch's layer takes queries, keys and values apart: its maps are the same function.
    out = attention_maps(module)(plain(x))
    return Wide.of(out, x.claim) if isinstance(x, Wide) else out


register_perturbation(nn.MultiheadAttention)(_attention)


@register_perturbation(Residual)
@register_perturbation(InvertibleResidual)
def _(module: Residual | InvertibleResidual, x: Tensor) -> tuple[Tensor, Modulus]:
    return _residual(module.branch, x, 1.0, 1.0)


@register_perturbation(ConvexResidual)
def _(module: ConvexResidual, x: Tensor) -> tuple[Tensor, Modulus]:
    return _residual(module.branch, x, 1.0 - module.weight, module.weight)


def _residual(branch: nn.Module, x: Tensor, kept: float, added: float) -> tuple[Tensor, Modulus]:
    """kept x + added f(x)."""
    split = _projected_attention(branch)
    if split is not None and split[0] == math.inf:
        out = _attend(split[1], x)
        joint = lofast_modulus(split[1], plain(x), residual=kept, scale=added)
        return kept * x + added * same_shape(x, out), Named(joint, "LoFAST")
    out, inner = _child(branch, "branch", apart(x, branch))
    y = kept * x + added * same_shape(x, out)

    def added_up(delta: Tensor) -> Tensor:
        return (abs(kept) * delta + abs(added) * inner(delta)) * ROUND_UP**2

    # For more tokens the norm of both together is bounded by the sum, and there is nothing to gain.
    if split is None or x.shape[-2] * x.shape[-1] > EXACT:
        joined = partial(beside, branch=inner.passage) if kept == added == 1.0 else None
        return y, Named(added_up, "residual", joined)
    radius, attention = split
    within = lofast_modulus(attention, plain(x), residual=kept, scale=added)
    longest = enlarge(torch.linalg.vector_norm(plain(x), dim=-1).amax(-1))

    def modulus(delta: Tensor) -> Tensor:
        total = added_up(delta)
        inside = (longest + delta) * ROUND_UP <= radius
        return torch.where(inside, torch.minimum(total, within(delta)), total)

    return y, Named(modulus, "LoFAST")


def _projected_attention(branch: nn.Module) -> tuple[float, nn.Module] | None:
    """Radius (infinite without one) and attention, if nothing but projections on balls precedes it."""
    *before, last = chain(branch, Ask("l2")) or [branch]
    if _rule_of(last) is not _attention:
        return None
    balls = [part for part in before if isinstance(part, BallProjection)]
    if len(balls) < len(before):
        return None
    return min((ball.radius for ball in balls), default=math.inf), last
