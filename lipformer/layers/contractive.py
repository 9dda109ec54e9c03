"""A module divided by its own bound."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, NotCertifiable, register_bound
from lipformer.certificate.bounds import bound_of, check_norm, check_seq_len
from lipformer.functional.spectral.bound import spectral_norm_bounds
from lipformer.layers.attention.bound import (
    attention_bound,
    bake_attention,
    contractive_head_bounds,
    head_matrices,
    positive,
)
from lipformer.layers.attention.multihead import L2MultiheadAttention
from lipformer.layers.baking import FirstOutput, Scaled, bake_in_place, register_bake, round_down
from lipformer.layers.branch import call_branch
from lipformer.layers.decoding import Cache, step_module
from lipformer.layers.freezing import Freezable
from lipformer.layers.spectral import rounding_margin

# Norms that norm=None chooses from; the smallest bound wins.
_CHOICES = ("l2", "token", "linf")


class Contractive(Freezable):
    r""":math:`\frac{c}{UB(f)} f`, of constant at most c in the norm of UB, the certified bound of f.

    UB is recomputed in every forward pass and gradients flow through it. L2 attention is divided head
    by head, each by its own gain (docs/theory, section 2), so that heads of short range are hardly
    shrunk. Dropout in the module counts as in eval mode. A module of bound 0 has nothing to divide by
    and is multiplied by c alone.

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
        self.module = module
        self.coeff = float(coeff)
        self.norm = norm
        self.seq_len = seq_len
        attentions = [part for part in module.modules() if isinstance(part, L2MultiheadAttention)]
        self._holds_attention = bool(attentions)
        if seq_len is not None:
            # Longer inputs than certified must fail, not pass uncertified.
            for attention in attentions:
                attention.max_len = min(seq_len, attention.max_len or seq_len)
        self.norms = self._possible_norms()

    @property
    def max_len(self) -> int | None:
        """The largest number of tokens that the constant holds for, or None for any."""
        return self.seq_len

    def _ask(self, norm: str, known: list[tuple[Tensor, Tensor]] | None = None) -> Ask:
        return Ask(norm, self.seq_len, "module", type(self.module).__name__, as_eval=True, known=known)

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
                refusals.append(error)
        if not found:
            raise refusals[0]
        self._names = tuple(name for name, _ in self.module.named_parameters())
        normed = {id(weight) for weight, _ in known}
        self._normed = tuple(name for name, p in self.module.named_parameters() if id(p) in normed)
        return tuple(found)

    def _now(self, names: tuple[str, ...]) -> tuple[Tensor, ...]:
        """The tensors that stand under these names; what is gone since is left out."""
        found: list[object] = []
        for name in names:
            place: object = self.module
            for step in name.split("."):
                place = getattr(place, step, None)
            found.append(place)
        return tuple(tensor for tensor in found if isinstance(tensor, Tensor))

    def scales(self) -> Tensor:
        """The factors of this forward pass, with their gradient.

        Returns:
            (H,) for the heads of L2 attention, a scalar for any other module.
        """
        return self.derived(self._scales, self.sources())

    def _scales(self) -> Tensor:
        matrices = self.matrices()
        return self.scales_of(matrices, spectral_norm_bounds(matrices))

    def sources(self) -> tuple[Tensor, ...]:
        """The weights that the factors come from."""
        return self._now(self._names)

    def matrices(self) -> list[Tensor]:
        """The matrices (*, m, n) by whose spectral norms the module is divided, as far as noted.

        Weights of layers that were put in later are not among them: their norms are computed when the
        rules ask for them.
        """
        if isinstance(self.module, L2MultiheadAttention):
            return list(head_matrices(self.module, self.norms).values())
        return [weight for weight in self._now(self._normed) if weight.ndim == 2]

    def scales_of(self, matrices: list[Tensor], norms: list[Tensor]) -> Tensor:
        """:meth:`scales` from the bounds of the norms of :meth:`matrices`."""
        options = self._options(matrices, norms)
        if len(options) == 1:
            return options[0]
        return torch.stack(options).index_select(0, self._choice(options)).squeeze(0)

    def _options(self, matrices: list[Tensor], norms: list[Tensor]) -> list[Tensor]:
        """The factors for each of the norms in which the module may be divided, (H,) or scalars."""
        margin = max([0.0, *(rounding_margin(p) for p in self.module.parameters())])
        coeff = self.coeff * (1.0 - margin)
        if isinstance(self.module, L2MultiheadAttention):
            asks = [self._ask(norm) for norm in self.norms]
            bounds = contractive_head_bounds(self.module, asks, norms)
            return [coeff * positive(bound).reciprocal() for bound in bounds]
        # Where the weights are: a bound may be a number, which is divided by here.
        like = next(self.module.parameters(), torch.empty(()))
        options, known = [], list(zip(matrices, norms, strict=True))
        for norm in self.norms:
            bound = bound_of(self.module, self._ask(norm, known)).value
            if isinstance(bound, Tensor):
                options.append(coeff * positive(bound).reciprocal())
            else:
                factor = coeff / (max(bound, 1e-6) if bound else 1.0)
                # Not like.new_full: of a weight that is shared out it would be shared out too.
                options.append(torch.full((), factor, dtype=torch.float64, device=like.device))
        return options

    @staticmethod
    def _choice(options: list[Tensor]) -> Tensor:
        """The index of the norm that shrinks least, (1,)."""
        return torch.stack([option.detach().mean() for option in options]).argmax(0, keepdim=True)

    @torch.no_grad()
    def norm_in_use(self) -> str:
        """The norm that the module is divided for with its present weights; it may change with them."""
        if len(self.norms) == 1:
            return self.norms[0]
        matrices = self.matrices()
        return self.norms[int(self._choice(self._options(matrices, spectral_norm_bounds(matrices))))]

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Runs the module and divides; shapes as the module's."""
        scales = self.scales()
        if isinstance(self.module, L2MultiheadAttention):
            return self.module.scaled(x, scales, scales.mean(), key_padding_mask)
        if self.seq_len is not None and not self._holds_attention and x.shape[-2] > self.seq_len:
            raise ValueError(f"seq_len is {self.seq_len}, got shape {tuple(x.shape)}")
        out = call_branch(self.module, x, key_padding_mask)
        return out * round_down(scales, out.dtype)

    def step(
        self, x: Tensor, cache: Cache = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        """Step-by-step decoding of a causal module (see :func:`step_module`)."""
        scales = self.scales()
        if not isinstance(self.module, L2MultiheadAttention):
            out, cache = step_module(self.module, x, cache, key_padding_mask)
            return out * round_down(scales, out.dtype), cache
        if self.module.causal is not True:
            raise ValueError(f"step needs attention built with causal=True, got {self.module.causal}")
        return self.module.step(x, cache, key_padding_mask, head_scale=scales, bias_scale=scales.mean())

    def extra_repr(self) -> str:
        return f"coeff={self.coeff}, norm={self.norm!r}, seq_len={self.seq_len}"


@register_bound(Contractive)
def _(module: Contractive, ask: Ask) -> Bound:
    if module.seq_len is not None and (ask.seq_len or 0) > module.seq_len:
        raise ask.refuse(
            f"seq_len={ask.seq_len} exceeds the {module.seq_len} that it was divided for",
            f"seq_len <= {module.seq_len}",
        )
    if ask.as_eval and ask.seq_len is None and module.norms == (ask.norm,):
        # Asked by a module around it in each forward pass: no bound is computed for a known constant.
        return Bound(module.coeff, f"divided by its {ask.norm} bound")
    seq_len = module.seq_len if ask.seq_len is None else ask.seq_len
    inner = replace(ask, path=f"{ask.path}.module" if ask.path else "module", seq_len=seq_len)
    matrices = module.matrices()
    options = module._options(matrices, spectral_norm_bounds(matrices))
    choice = module._choice(options)
    scales = torch.stack(options).index_select(0, choice).squeeze(0)
    divided = module.norms[int(choice)] if ask.readable(choice) else " or ".join(module.norms)
    if isinstance(module.module, L2MultiheadAttention):
        value = attention_bound(module.module, inner, scales)
    else:
        value = bound_of(module.module, inner).value * scales.amax()
    if ask.norm in module.norms:
        # In the norm that it was divided by, the constant is known without a second bound.
        chosen = (choice == module.norms.index(ask.norm)).squeeze(0)
        value = torch.where(chosen, module.coeff, value)
    return Bound(value, f"divided by its {divided} bound")


@register_bake(Contractive)
def _(module: Contractive) -> nn.Module:
    scales = module.scales()
    if isinstance(module.module, L2MultiheadAttention):
        return FirstOutput(bake_attention(module.module, scales, scales.mean()))
    return Scaled(bake_in_place(module.module), scales)
