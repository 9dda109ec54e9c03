"""What a classifier of sequences is made of, as plain values that a JSON file can hold."""

from __future__ import annotations

from dataclasses import dataclass

from lipformer.saving.entries import ModelConfig


@dataclass(frozen=True)
class EncoderClassifierConfig(ModelConfig):
    """All options of an :class:`EncoderClassifier`.

    Attributes:
        variant: "l2" (every part certified) or "dot_product" (a plain pre-norm Transformer encoder of
            the same size, to compare with).
        num_classes: K.
        vocab_size: V, for symbols; or
        features: of a token, for continuous input.
        dim: D, the width of a token.
        num_heads: H, a divisor of D.
        num_layers: blocks of attention and feed-forward.
        hidden: width inside the feed-forward part, even; default 2 D.
        max_len: most tokens of a sequence.
        dropout: of embedded tokens, and of the feed-forward parts of "dot_product", in training.
        position_std: standard deviation of the initial positions, learned vectors that are added.
        least: n_0, the tokens that a mean is at least taken over (:class:`lipformer.TokenMean`): the
            certificate is :math:`1/\\sqrt{n_0}`, and what is shorter has smaller features.
        token_radius: of the ball that symbols' vectors are projected on ("l2" with vocab_size only), so
            that no two are farther apart than twice this; default 1.
        attention_weight: a in the convex residual (1 - a) x + a attention(x) ("l2" only); default 0.5.
        feed_forward_weight: likewise around the feed-forward part; default 0.5.
        token_shift: attention sees half of the features of the token before ("l2" only); default True.
        key_radius: initial radius of the balls that bound each head's keys (Theorem F; "l2" only); None
            for none.
        head_coeff: bound of the norm of the last linear map ("l2" only); default 1.
    """

    variant: str
    num_classes: int
    vocab_size: int | None = None
    features: int | None = None
    dim: int = 64
    num_heads: int = 4
    num_layers: int = 2
    hidden: int | None = None
    max_len: int = 64
    dropout: float = 0.0
    position_std: float = 0.02
    least: int = 1
    token_radius: float | None = None
    attention_weight: float | None = None
    feed_forward_weight: float | None = None
    token_shift: bool | None = None
    key_radius: float | None = None
    head_coeff: float | None = None

    def __post_init__(self) -> None:
        self.check_choice("variant", "dot_product", "l2")
        if (self.vocab_size is None) == (self.features is None):
            raise ValueError(
                "give vocab_size, for symbols, or features, for continuous input; got "
                f"vocab_size={self.vocab_size}, features={self.features}"
            )
        certified = {
            "attention_weight": 0.5,
            "feed_forward_weight": 0.5,
            "token_shift": True,
            "key_radius": None,
            "head_coeff": 1.0,
            "token_radius": 1.0,
        }
        own = dict(certified) if self.variant == "l2" else {}
        if self.vocab_size is None:
            own.pop("token_radius", None)
        self.check_foreign(self.variant, own, *certified)
        self.fill(hidden=2 * self.dim, **own)
        self.check_positive("num_classes", "vocab_size", "features", "dim", "num_heads", "num_layers")
        self.check_positive("hidden", "max_len", "least", "token_radius", "key_radius", "head_coeff")
        self.check_positive("attention_weight", "feed_forward_weight")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout!r}")
