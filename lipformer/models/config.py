"""What a language model is made of, as plain values that a JSON file can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lipformer.models.entries import (
    MOST_LAYERS,
    check_parameters,
    check_positive,
    check_size,
    echo,
    is_number,
    is_positive,
    known_entries,
    one_of,
)

POSITIONS = ("alibi", "rotary", "sinusoidal", "none")
NORM_PLACES = ("pre", "post", "none")
CONTRACTION_NORMS = ("self", "l2", "token", "linf")
# Larger than other sizes may be: no memory is taken for max_len.
LONGEST = 2**31 - 1

# The options that belong to each variant, with its best known values (docs/models). An option that
# is not listed does nothing in that variant, so that giving it is an error.
VARIANT_OPTIONS: dict[str, dict[str, Any]] = {
    "dot_product": {"norm_place": "pre", "token_shift": False},
    "l2_untied": {"norm_place": "pre", "token_shift": False},
    "l2": {"norm_place": "pre", "token_shift": True, "value_proj": False},
    "contractive": {
        "token_shift": True,
        "norm_place": "post",
        "value_proj": False,
        "coeff": 1.0,
        "norm": "self",
        "bound": None,
    },
    "lipschitz": {
        "token_shift": True,
        "norm_place": "none",
        "value_proj": False,
        "coeff": 1.0,
        "norm": "l2",
        "head_coeff": 32.0,
    },
    "invertible": {"token_shift": True, "value_proj": False, "coeff": 0.9, "norm": "self"},
}
# What the paper's own scaling fixes.
_KIM2021: dict[str, Any] = {"norm_place": "post", "value_proj": True, "norm": "linf"}
_OPTIONAL = ("value_proj", "norm_place", "coeff", "norm", "bound", "head_coeff")


@dataclass(frozen=True)
class LanguageModelConfig:
    """The whole description of a :class:`LanguageModel`.

    None stands for the best known value of the variant, and is replaced by it. Options that a variant
    does not have stay None; giving them is an error. A model may have 10^10 parameters at most, and
    numbers lie between 1e-30 and 1e30.

    Attributes:
        variant: "dot_product", "l2_untied", "l2", "contractive", "lipschitz" or "invertible".
        vocab_size: V, the number of symbols.
        dim: D, the width of a token.
        num_heads: H, a divisor of D.
        num_layers: number of blocks of attention and feed-forward.
        hidden: width between the two layers of the feed-forward part, default 4 D.
        max_len: the largest number of tokens. With ALiBi any length may be used and the
            certificate holds at any length: max_len is then only the length of training blocks.
        dropout: of attention weights and hidden features, in training.
        positions: "alibi" (default), "rotary", "sinusoidal" (added to the embedding) or "none".
        slopes: ALiBi slopes, one per head; default 1/4 to 1/256 for dot_product and l2_untied, 1/2 to
            1/16 where query and key are tied.
        token_shift: a :class:`lipformer.TokenShift` before each attention: half of the features are
            those of the token before. Default where query and key are tied: such a kernel always
            prefers the token itself and cannot look one back.
        query_scale: what the initial W_Q is multiplied by.
        value_proj: tied L2 attention in the paper's form (True) or in the lean form (False).
        norm_place: "pre" or "post" (LayerNorm), "none"; in "lipschitz" "pre" is a CenterNorm.
        coeff: bound of each contractive branch.
        norm: the norm that branches contract in: "self" (Theorem E), "l2", "token" or "linf".
        bound: "kim2021" divides by the published l_inf bound (contractive only).
        head_coeff: bound of the last linear map (lipschitz only).
        vocabulary: the symbols in the order of their numbers, one character each.
    """

    variant: str
    vocab_size: int
    dim: int = 128
    num_heads: int = 4
    num_layers: int = 3
    hidden: int | None = None
    max_len: int = 256
    dropout: float = 0.0
    positions: str | None = None
    slopes: tuple[float, ...] | None = None
    token_shift: bool | None = None
    query_scale: float = 1.0
    value_proj: bool | None = None
    norm_place: str | None = None
    coeff: float | None = None
    norm: str | None = None
    bound: str | None = None
    head_coeff: float | None = None
    vocabulary: str | None = None

    def __post_init__(self) -> None:
        one_of("variant", self.variant, tuple(VARIANT_OPTIONS))
        own = VARIANT_OPTIONS[self.variant]
        for name in _OPTIONAL:
            if name not in own and getattr(self, name) is not None:
                raise ValueError(
                    f"the variant {self.variant!r} has no option {name}, got {name}="
                    f"{echo(getattr(self, name))}; beside those of all variants it has {', '.join(own)}"
                )
        if self.bound is not None:
            one_of("bound", self.bound, ("kim2021",))
            own = {**own, **_KIM2021}
        for name, value in {"positions": "alibi", "hidden": self._default_hidden(), **own}.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        self._check_sizes()
        self._check_choices()
        self._check_slopes()
        self._check_vocabulary()

    def _default_hidden(self) -> int | None:
        return 4 * self.dim if isinstance(self.dim, int) else None

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "dim", "num_heads", "hidden"):
            check_size(name, getattr(self, name))
        check_size("num_layers", self.num_layers, MOST_LAYERS)
        check_size("max_len", self.max_len, LONGEST)
        assert self.hidden is not None
        sizes = {name: getattr(self, name) for name in ("vocab_size", "dim", "num_layers", "hidden")}
        block = 4 * self.dim**2 + 2 * self.dim * self.hidden
        check_parameters(2 * self.vocab_size * self.dim + self.num_layers * block, sizes)
        if self.dim % self.num_heads:
            raise ValueError(
                f"dim must be a multiple of num_heads, got dim={self.dim}, num_heads={self.num_heads}"
            )
        if not is_number(self.dropout) or not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {echo(self.dropout)}")
        for name in ("query_scale", "coeff", "head_coeff"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.variant == "invertible" and not (self.coeff or 1.0) < 1.0:
            raise ValueError(f"coeff must be below 1 in an invertible model, got {self.coeff!r}")

    def _check_choices(self) -> None:
        one_of("positions", self.positions, POSITIONS)
        if self.norm_place is not None:
            allowed = ("pre", "none") if self.variant == "lipschitz" else NORM_PLACES
            one_of("norm_place", self.norm_place, allowed)
        if self.norm is not None:
            # The map from input to logits of the lipschitz variant is bounded in the l2 norm or the
            # token norm; a bound of each token's effect on itself alone would not bound it.
            without_self = self.variant == "lipschitz"
            one_of("norm", self.norm, CONTRACTION_NORMS[1 if without_self else 0 :])
        for name in ("value_proj", "token_shift"):
            if not isinstance(getattr(self, name), (bool, type(None))):
                raise ValueError(f"{name} must be True or False, got {echo(getattr(self, name))}")
        if self.bound == "kim2021" and (self.value_proj is not True or self.norm != "linf"):
            raise ValueError(
                "bound='kim2021' is the paper's form in the linf norm: value_proj=True and norm='linf', "
                f"got value_proj={self.value_proj!r}, norm={self.norm!r}"
            )

    def _check_slopes(self) -> None:
        if self.slopes is None:
            return
        given = self.slopes
        if self.positions != "alibi":
            raise ValueError(f"slopes need positions='alibi', got positions={self.positions!r}")
        if (
            not isinstance(given, (list, tuple))
            or len(given) != self.num_heads
            or not all(is_positive(s) for s in given)
        ):
            raise ValueError(f"slopes must be {self.num_heads} positive numbers, got {echo(given)}")
        object.__setattr__(self, "slopes", tuple(float(s) for s in given))

    def _check_vocabulary(self) -> None:
        symbols = self.vocabulary
        if symbols is None:
            return
        if not isinstance(symbols, str) or len(set(symbols)) != len(symbols):
            raise ValueError(f"vocabulary must be a string of distinct characters, got {echo(symbols)}")
        if len(symbols) != self.vocab_size:
            raise ValueError(
                f"vocabulary must have vocab_size={self.vocab_size} characters, got {len(symbols)}"
            )

    @property
    def any_length(self) -> bool:
        """Whether the model takes (and is certified for) sequences of any length."""
        # The published bound is for a number of tokens, whatever the positions.
        return self.positions == "alibi" and self.bound is None

    def to_dict(self) -> dict[str, Any]:
        """All entries as JSON values."""
        entries = dataclasses.asdict(self)
        return {**entries, "slopes": None if self.slopes is None else list(self.slopes)}

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> LanguageModelConfig:
        """The config of :meth:`to_dict`'s entries.

        Raises:
            ValueError: an entry is unknown, missing or wrong; it says which.
        """
        return cls(**known_entries(cls, entries))
