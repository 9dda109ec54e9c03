"""What a language model is made of, as plain values that a JSON file can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lipformer.functional.norms import NORMS
from lipformer.saving.entries import ModelConfig

# The options that belong to each variant, with its best known values (docs/models). An option that
# is not listed does nothing in that variant, so that giving it is an error.
VARIANT_OPTIONS: dict[str, dict[str, Any]] = {
    "dot_product": {"norm_place": "pre", "token_shift": False},
    "l2_untied": {"norm_place": "pre", "token_shift": False},
    "l2": {"norm_place": "pre", "token_shift": True, "value_proj": False, "key_radius": None},
    "contractive": {
        "token_shift": True,
        "norm_place": "pre",
        "value_proj": False,
        "key_radius": None,
        "coeff": 1.0,
        "norm": "self",
        "bound": None,
    },
    "lipschitz": {
        "token_shift": True,
        "norm_place": "none",
        "value_proj": False,
        "key_radius": None,
        "coeff": 1.0,
        "norm": "l2",
        "head_coeff": 32.0,
        "gather": 1,
        "attention_weight": 0.5,
        "feed_forward_weight": 0.5,
    },
    "invertible": {
        "token_shift": True,
        "value_proj": False,
        "key_radius": None,
        "coeff": 0.9,
        "norm": "self",
        "past_bias": True,
    },
}
# What the paper's own scaling fixes.
_KIM2021: dict[str, Any] = {"norm_place": "post", "value_proj": True, "norm": "linf"}


@dataclass(frozen=True)
class LanguageModelConfig(ModelConfig):
    """All options of a :class:`LanguageModel`.

    None, of positions "auto", stands for the variant's default, and is replaced by it.
    Options that a variant does not have stay None; giving them is an error.

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
        positions: "alibi", "rotary", "sinusoidal" (added to the embedding) or None for none; "auto", the
            default, is ALiBi.
        slopes: ALiBi slopes, one per head; default 1/4 to 1/256 for dot_product and l2_untied, 1/2 to
            1/16 where query and key are tied.
        token_shift: a :class:`lipformer.TokenShift` before each attention: half of the features are
            those of the token before. Default where query and key are tied: such a kernel always
            prefers the token itself and cannot look one back.
        query_scale: what the initial W_Q is multiplied by.
        value_proj: tied L2 attention in the paper's form (True) or in the lean form (False).
        key_radius: initial radius of the balls that bound each head's keys (Theorem F), in "invertible"
            smoothly; None for none.
        norm_place: "pre" or "post" (LayerNorm), "none"; in "lipschitz" "pre" is a CenterNorm.
        coeff: bound of each contractive branch.
        norm: the norm that branches contract in: "self" (Theorem E), "l2", "token" or "linf".
        past_bias: attention of the earlier tokens is added to a token before its feed-forward part,
            where it needs no bound (invertible only, in the norm "self", and the default there).
        bound: "kim2021" divides by the published l_inf bound (contractive only).
        head_coeff: bound of the last linear map (lipschitz only).
        gather: K: the trunk begins with a :class:`lipformer.layers.TokenStack` of the last K tokens,
            D / 4 features of each, between orthogonal maps (lipschitz only, D even); 1 for none.
        attention_weight: a in the convex residual (1 - a) x + a attention(x) (lipschitz only).
        feed_forward_weight: likewise around the feed-forward part; 1 for no residual.
        embedding_rms: root mean square of the features of each embedded symbol, whose length is then
            that times the root of D: a certificate can then not be evaded by large embeddings. None for
            learned lengths.
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
    positions: str | None = "auto"
    slopes: tuple[float, ...] | None = None
    token_shift: bool | None = None
    query_scale: float = 1.0
    value_proj: bool | None = None
    key_radius: float | None = None
    norm_place: str | None = None
    coeff: float | None = None
    norm: str | None = None
    past_bias: bool | None = None
    bound: str | None = None
    head_coeff: float | None = None
    gather: int | None = None
    attention_weight: float | None = None
    feed_forward_weight: float | None = None
    embedding_rms: float | None = None
    vocabulary: str | None = None

    def __post_init__(self) -> None:
        self.check_choice("variant", *VARIANT_OPTIONS)
        own = VARIANT_OPTIONS[self.variant]
        options = ("value_proj", "key_radius", "norm_place", "coeff", "norm", "past_bias", "bound")
        lipschitz = ("head_coeff", "gather", "attention_weight", "feed_forward_weight")
        self.check_foreign(self.variant, own, *options, *lipschitz)
        self.check_choice("bound", "kim2021", None)
        if "past_bias" in own and self.norm not in (None, "self"):
            if self.past_bias:
                raise ValueError(f"past_bias=True needs norm='self', got norm={self.norm!r}")
            own = {**own, "past_bias": False}
        self.fill(hidden=4 * self.dim, **({**own, **_KIM2021} if self.bound else own))
        if self.positions == "auto":
            object.__setattr__(self, "positions", "alibi")
        if self.slopes is not None:
            object.__setattr__(self, "slopes", tuple(self.slopes))
        self.check_positive("vocab_size", "dim", "num_heads", "num_layers", "hidden", "max_len")
        self.check_positive(
            "query_scale", "coeff", "head_coeff", "key_radius", "embedding_rms", "gather"
        )
        self._check_choices()

    def _check_choices(self) -> None:
        self.check_choice("positions", "alibi", "rotary", "sinusoidal", None)
        lipschitz = self.variant == "lipschitz"
        self.check_choice("norm_place", "pre", "none", None, *(() if lipschitz else ("post",)))
        # The map from input to logits of the lipschitz variant is bounded in the l2 norm or the token
        # norm; a bound of each token's effect on itself alone would not bound it.
        self.check_choice("norm", *(norm for norm in NORMS if norm != "self" or not lipschitz), None)
        if self.bound == "kim2021" and (not self.value_proj or self.norm != "linf"):
            raise ValueError(
                "bound='kim2021' is the paper's form in the linf norm: value_proj=True and norm='linf', "
                f"got value_proj={self.value_proj!r}, norm={self.norm!r}"
            )
        if self.key_radius is not None and self.norm == "linf":
            raise ValueError(
                "key_radius has no bound in the linf norm: norm='self', 'l2' or 'token', got "
                f"key_radius={self.key_radius!r}, norm={self.norm!r}"
            )
        if (self.gather or 1) > 1 and self.dim % 2:
            raise ValueError(f"gather needs an even dim, got gather={self.gather}, dim={self.dim}")
        symbols = self.vocabulary
        if symbols is not None and not len(set(symbols)) == len(symbols) == self.vocab_size:
            raise ValueError(
                f"vocabulary must be a string of vocab_size={self.vocab_size} distinct characters, got "
                f"{symbols!r}"
            )

    @property
    def any_length(self) -> bool:
        """Whether the model takes (and is certified for) sequences of any length."""
        # The published bound is for a number of tokens, whatever the positions.
        return self.positions == "alibi" and self.bound is None
