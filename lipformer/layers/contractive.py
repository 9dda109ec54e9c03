"""A module divided by its own bound."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, NotCertifiable, register_bound
from lipformer.certificate.bounds import bound_of, check_seq_len
from lipformer.certificate.paths import then_scaled
from lipformer.certificate.rules import kind_of
from lipformer.certificate.torch_rules import mixed_axes
from lipformer.functional.norms import check_norm
from lipformer.functional.rounding import ROUND_UP, is_cast, multiply_down
from lipformer.functional.spectral.bound import spectral_norm_bounds
from lipformer.layers.branch import Call, call_branch, one_layout
from lipformer.layers.decoding import Cache, register_step, step_module
from lipformer.layers.freezing import Freezable
from lipformer.layers.layer import bake_in_place, register_bake
from lipformer.layers.own_token import push_own, register_own_token
from lipformer.layers.per_head import Divisor, PerHead, chain_bound, divided_part, per_head, replace_part
from lipformer.layers.scaled import FirstOutput, Scaled

# Norms that norm=None chooses from; the smallest bound wins.
_CHOICES = ("l2", "token", "linf")


def positive(bound: Tensor) -> Tensor:
    """Keeps a bound that is divided by away from zero, as a larger bound.

    A bound of exactly 0 becomes 1: such a module (a zero-initialised output, or a custom layer whose
    tokens have no effect on themselves, in the self norm) has the constant 0 at any scale, so that
    there is nothing to divide by, and what the bound does not see (biases, gradients, the effect on
    other tokens) must not be enlarged. Other small bounds are raised to 1e-6, so that gradients stay
    finite.
    """
    # threshold, whose derivative is one kernel where that of clamp_min is three. A product of bounds
    # with a zero among them may be a little more than zero (product_up).
    return F.threshold(F.threshold(bound, 1e-200, 1.0), 1e-6, 1e-6)


class Contractive(Freezable):
    r"""Divides a module f by its bound UB: :math:`\frac{c}{UB(f)} f` has constant at most c.

    UB is recomputed in every forward pass and gradients flow through it. L2 attention is divided head
    by head, each head by its own gain (docs/theory, section 2), so that heads of short range are hardly
    shrunk. So is a sequence with one attention layer: its factors then also divide by the bounds of the
    other parts, and act inside the attention. Dropout in the module is treated as in eval mode. A module
    of bound 0 is only multiplied by c.

    Args:
        module: any certifiable module. Attention needs a length: ``seq_len``, its own max_len, a
            window or ALiBi.
        coeff: :math:`c > 0`.
        norm: "l2", "token", "linf", "self" (causal modules), or None for whichever of the first three
            has the smallest bound; in the other norms the constant may then exceed c.
        seq_len: the largest number of tokens; attention inside takes it as its max_len.

    Example:
        >>> import lipformer as lf
        >>> layer = lf.Contractive(lf.L2MultiheadAttention(16, 4, max_len=64), coeff=0.9, norm="l2")
        >>> lf.certify(layer).bound
        0.9
    """

    def __init__(
        self,
        module: nn.Module,
        coeff: float = 0.9,
        *,
        norm: str | None = None,
        seq_len: int | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 < coeff < math.inf:
            raise ValueError(f"coeff must be positive and finite, got {coeff!r}")
        if norm is not None:
            check_norm(norm)
        check_seq_len(seq_len)
        self.module = one_layout(module)
        self.coeff = float(coeff)
        self._norm = norm
        self.seq_len = seq_len
        if seq_len is not None:
            # Longer inputs than certified must fail, not pass uncertified.
            for part in self._limited():
                part.max_len = min(seq_len, part.max_len or seq_len)  # type: ignore[assignment, type-var]
        self.norms = self._possible_norms()

    @property
    def norm(self) -> str | None:
        """The norm that the module is divided in, None for that of the smallest bound; fixed."""
        return self._norm

    def _limited(self) -> Iterator[nn.Module]:
        """The parts that refuse inputs longer than their max_len."""
        refuse = self._ask("l2").refuse
        return (part for part in self.module.modules() if per_head.find(part, refuse) is not None)

    @property
    def max_len(self) -> int | None:
        """The largest number of tokens that the constant holds for, or None for any."""
        return self.seq_len

    def _ask(self, norm: str, known: list[tuple[Tensor, Tensor]] | None = None) -> Ask:
        return Ask(norm, self.seq_len, "module", kind_of(self.module), in_forward=True, known=known)

    def _possible_norms(self) -> tuple[str, ...]:
        """The norms in which the module has a bound; raises NotCertifiable if there is none."""
        found, refusals = [], []
        known: list[tuple[Tensor, Tensor]] = []
        for norm in _CHOICES if self.norm is None else (self.norm,):
            try:
                with torch.no_grad():
                    bound_of(self.module, self._ask(norm, known))
                found.append(norm)
            except NotCertifiable as error:
                # Its frames hold the weights, in a cycle with this one.
                refusals.append(error.with_traceback(None))
        if not found:
            raise refusals[0]
        places = [
            (part, name)
            for part in self.module.modules()
            for name, weight in part._parameters.items()
            if weight is not None
        ]
        normed = {id(weight) for weight, _ in known}
        self._places = places
        self._normed = [(part, name) for part, name in places if id(part._parameters[name]) in normed]
        return tuple(found)

    def scales(self) -> Tensor:
        """The factors of this forward pass, with their gradient.

        Returns:
            (H,) for the heads of a module that is divided head by head, a scalar for any other.
        """
        return self._factors()[0]

    def _factors(self) -> tuple[Tensor, Tensor | None]:
        def compute() -> tuple[Tensor, Tensor | None]:
            matrices = self.matrices()
            return self.factors_of(matrices, spectral_norm_bounds(matrices))

        return self.derived(compute, self.sources())

    def sources(self) -> tuple[Tensor, ...]:
        """The weights that the factors come from."""
        return _weights(self._places)

    def _divided(self) -> tuple[nn.Module, PerHead] | None:
        return divided_part(self.module, self._ask("l2"))

    def matrices(self) -> list[Tensor]:
        """The matrices (*, m, n) by whose spectral norms the module is divided, as far as noted.

        Weights of layers that were put in later are not among them: their norms are computed when the
        rules ask for them.
        """
        divided = self._divided()
        rest = [weight for weight in _weights(self._normed) if weight.ndim == 2]
        return rest if divided is None else [*divided[1].matrices(divided[0], self.norms), *rest]

    def factors_of(self, matrices: list[Tensor], norms: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """:meth:`scales` from the bounds of the norms of :meth:`matrices`, and the norm's index (1,).

        The index is None where there is one norm alone.
        """
        options = self._options(matrices, norms)
        if len(options) == 1:
            return options[0], None
        choice = self._choice(options)
        return _pick(options, choice), choice

    def _options(self, matrices: list[Tensor], norms: list[Tensor]) -> list[Tensor]:
        """The factors for each of the norms in which the module may be divided, (H,) or scalars."""
        weights = self.sources()
        asks = [self._ask(norm, list(zip(matrices, norms, strict=True))) for norm in self.norms]
        divided = self._divided()
        if divided is None:
            rests = [bound_of(self.module, ask).value for ask in asks]
            divisors: list[Divisor | None] = [None] * len(asks)
        else:
            layer, rule = divided
            rests = [chain_bound(self.module, ask, layer, lambda ask: Bound(1.0)).value for ask in asks]
            divisors = list(rule.divisors(layer, asks, norms))
        options = []
        coeff = self.coeff / ROUND_UP  # for the rounding of the factors themselves
        for rest, divisor in zip(rests, divisors, strict=True):
            value, lost = rest, None
            if divisor is not None:
                bound, lost = divisor
                value = bound if isinstance(rest, float) and rest == 1.0 else rest * bound
            if isinstance(value, Tensor):
                factor = coeff * positive(value).reciprocal()
                options.append(factor if lost is None else F.relu(factor - lost))
            else:
                # Where the weights are. Not new_full: of a weight that is shared out it would be too.
                known = coeff / (max(value, 1e-6) if value else 1.0)
                device = weights[0].device if weights else None
                options.append(torch.full((), known, dtype=torch.float64, device=device))
        return options

    @staticmethod
    def _choice(options: list[Tensor]) -> Tensor:
        """The index of the norm that shrinks least, (1,)."""
        return torch.stack([option.detach().mean() for option in options]).argmax(0, keepdim=True)

    @torch.no_grad()
    def norm_in_use(self) -> str:
        """The norm that the module is divided for with its present weights; it may change with them."""
        choice = None if len(self.norms) == 1 else self._factors()[1]
        return self.norms[0 if choice is None else int(choice)]

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Runs the module and divides; shapes as the module's."""
        scales = self.scales()
        if scales.ndim:
            return call_branch(self.module, x, key_padding_mask, scales, context)
        self.check_length(x)
        out = call_branch(self.module, x, key_padding_mask, None, context)
        return multiply_down(out, scales)

    def check_length(self, x: Tensor) -> None:
        """Raises for more tokens than the module was divided for, unless the module does."""
        if self.seq_len is None or x.shape[-2] <= self.seq_len:
            return
        if next(self._limited(), None) is None:
            raise ValueError(f"seq_len is {self.seq_len}, got shape {tuple(x.shape)}")

    def extra_repr(self) -> str:
        return f"coeff={self.coeff}, norm={self.norm!r}, seq_len={self.seq_len}"


def _pick(options: list[Tensor], choice: Tensor) -> Tensor:
    """The option of an index (1,), which stays on its device."""
    return torch.stack(options).index_select(0, choice).squeeze(0)


def _weights(places: list[tuple[nn.Module, str]]) -> tuple[Tensor, ...]:
    """The weights that stand in these places now."""
    found = (part._parameters.get(name) for part, name in places)
    return tuple(weight for weight in found if weight is not None)


@register_bound(Contractive)
def _(module: Contractive, ask: Ask) -> Bound:
    if module.seq_len is not None and (ask.seq_len or 0) > module.seq_len:
        raise ask.refuse(
            f"seq_len={ask.seq_len} exceeds the {module.seq_len} that it was divided for",
            f"seq_len <= {module.seq_len}",
        )
    if ask.in_forward and ask.seq_len is None and module.norms == (ask.norm,):
        # Asked by a module around it in each forward pass: no bound is computed for a known constant.
        return Bound(module.coeff, f"divided by its {ask.norm} bound")
    seq_len = module.seq_len if ask.seq_len is None else ask.seq_len
    inner = replace(ask, path=f"{ask.path}.module" if ask.path else "module", seq_len=seq_len)
    matrices = module.matrices()
    options = module._options(matrices, spectral_norm_bounds(matrices))
    choice = module._choice(options)
    scales = _pick(options, choice)
    name = module.norms[int(choice)] if ask.readable(choice) else " or ".join(module.norms)
    divided = module._divided()
    if divided is None:
        whole = bound_of(module.module, inner)
        value = whole.value * scales.amax()
        passage = then_scaled(whole.passage, scales)
    else:
        layer, rule = divided
        mixed = None if ask.in_forward else mixed_axes(module.module)
        if mixed is not None:
            raise ask.refuse(mixed, "attention with batch_first=True")
        whole = chain_bound(module.module, inner, layer, lambda ask: rule.bound(layer, ask, scales))
        value = torch.as_tensor(whole.value, dtype=torch.float64, device=scales.device)
        passage = whole.passage
    if ask.norm in module.norms and (ask.in_forward or not any(map(is_cast, module.parameters()))):
        # In the norm that it was divided by, the constant is known without a second bound. Autocast
        # runs another function: with the same factors, but weights that it rounds.
        chosen = (choice == module.norms.index(ask.norm)).squeeze(0)
        value = torch.where(chosen, module.coeff, value)
    theorem = f"divided by its {name} bound"
    return Bound(value, theorem, tokens=whole.tokens, dims=whole.dims, passage=passage)


@register_bake(Contractive)
def _(module: Contractive) -> nn.Module:
    # A copy: what others share with it must not get its factors.
    module = copy.deepcopy(module)
    scales, divided = module.scales(), module._divided()
    if divided is None:
        return bake_in_place(Scaled(module.module, scales))
    layer, rule = divided
    baked = rule.bake(layer, scales)
    return FirstOutput(bake_in_place(replace_part(module.module, layer, baked), {baked: baked}))


@register_step(Contractive)
def _(module: Contractive, x: Tensor, cache: Cache, call: Call) -> tuple[Tensor, Cache]:
    scales = module.scales()
    if scales.ndim:
        return step_module(module.module, x, cache, *call._replace(head_scale=scales))
    out, cache = step_module(module.module, x, cache, *call.inside())
    return multiply_down(out, scales), cache


@register_own_token(Contractive, parts=lambda module: {"module": module.module})
def _(module: Contractive, x: Tensor, tangents: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    scales = module.scales()
    if scales.ndim:
        return push_own(module.module, x, tangents, *call._replace(head_scale=scales))
    module.check_length(x)
    out, pushed = push_own(module.module, x, tangents, *call.inside())
    return multiply_down(out, scales), multiply_down(pushed, scales)
