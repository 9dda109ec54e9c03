"""What a Vision Transformer is made of, as plain values that a JSON file can hold."""

from __future__ import annotations

from dataclasses import dataclass

from lipformer.saving.entries import ModelConfig


@dataclass(frozen=True)
class VisionTransformerConfig(ModelConfig):
    """All options of a :class:`VisionTransformer`.

    Attributes:
        variant: "dot_product" (dot-product attention on tokens inside a ball, certified around each
            image by LoFAST) or "l2" (L2 attention, one constant for all images).
        image_size: pixels in each direction.
        channels: C.
        patch_size: pixels of a patch in each direction, a divisor of image_size.
        num_classes: K.
        dim: D, the width of a token.
        num_heads: H, a divisor of D.
        num_layers: blocks of attention and feed-forward.
        hidden: width inside the feed-forward part, even; default 2 D.
        attention_weight: a in the convex residual (1 - a) x + a attention(x).
        feed_forward_weight: likewise around the feed-forward part; 1 leaves the residual out.
        feed_forward_mode: "normalize" (its two maps are divided by their norms) or "orthogonal" (their
            singular values are drawn together, too, so that they shrink nothing).
        pooling: "flatten" (the head sees all tokens) or "mean" (their mean, of constant
            :math:`1/\\sqrt N`).
        readout: width of one more layer of norm 1, with MaxMin, between pooling and head; even.
        position_std: standard deviation of the initial positions.
        mean: of the pixels, one number for each channel; default 0. Pixels are normalised inside the
            model, so that its input lies in [0, 1].
        std: of the pixels, one number for each channel; default 1.
        radius: of the ball that tokens are projected on before each attention ("dot_product" only);
            default 4.
        logit_coeff: bound of the norms of all query and of all key weights ("dot_product" only);
            default 1.
        key_radius: initial radius of the balls that bound each head's keys (Theorem F; "l2" only); None
            for none.
    """

    variant: str
    image_size: int
    channels: int
    patch_size: int
    num_classes: int
    dim: int = 64
    num_heads: int = 4
    num_layers: int = 2
    hidden: int | None = None
    attention_weight: float = 0.1
    feed_forward_weight: float = 0.5
    feed_forward_mode: str = "normalize"
    pooling: str = "flatten"
    readout: int | None = None
    position_std: float = 0.1
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    radius: float | None = None
    logit_coeff: float | None = None
    key_radius: float | None = None

    def __post_init__(self) -> None:
        self.check_choice("variant", "dot_product", "l2")
        self.check_choice("pooling", "flatten", "mean")
        self.check_choice("feed_forward_mode", "normalize", "orthogonal")
        dot_product = self.variant == "dot_product"
        own = {"radius": 4.0, "logit_coeff": 1.0} if dot_product else {"key_radius": None}
        self.check_foreign(self.variant, own, "radius", "logit_coeff", "key_radius")
        pixels = {"mean": (0.0,) * self.channels, "std": (1.0,) * self.channels}
        self.fill(hidden=2 * self.dim, **own, **pixels)
        for name in pixels:
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self.check_positive("image_size", "channels", "patch_size", "num_classes", "dim", "num_heads")
        self.check_positive("num_layers", "hidden", "readout", "std", "attention_weight", "key_radius")
        if self.image_size % self.patch_size:
            raise ValueError(
                "image_size must be a multiple of patch_size, got "
                f"image_size={self.image_size}, patch_size={self.patch_size}"
            )

    @property
    def tokens(self) -> int:
        """N, the number of patches."""
        return (self.image_size // self.patch_size) ** 2
