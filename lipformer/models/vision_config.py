"""What a Vision Transformer is made of, as plain values that a JSON file can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lipformer.models.entries import (
    LARGEST_SIZE,
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

VARIANTS = ("dot_product", "l2")
POOLINGS = ("flatten", "mean")
_SIZES = ("image_size", "channels", "patch", "classes", "dim", "num_heads", "num_layers", "hidden")


@dataclass(frozen=True)
class VisionTransformerConfig:
    """The whole description of a :class:`VisionTransformer`.

    A model may have 10^10 parameters at most, and numbers lie between 1e-30 and 1e30.

    Attributes:
        variant: "dot_product" (dot-product attention on tokens inside a ball, certified around each
            image by LoFAST) or "l2" (L2 attention, one constant for all images).
        image_size: pixels in each direction.
        channels: C.
        patch: pixels of a patch in each direction, a divisor of image_size.
        classes: K.
        dim: D, the width of a token.
        num_heads: H, a divisor of D.
        num_layers: blocks of attention and feed-forward.
        hidden: width inside the feed-forward part, even; default 2 D.
        attention_weight: a in the convex residual (1 - a) x + a attention(x).
        feed_forward_weight: likewise around the feed-forward part; 1 leaves the residual out.
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
    """

    variant: str
    image_size: int
    channels: int
    patch: int
    classes: int
    dim: int = 64
    num_heads: int = 4
    num_layers: int = 2
    hidden: int | None = None
    attention_weight: float = 0.1
    feed_forward_weight: float = 0.5
    pooling: str = "flatten"
    readout: int | None = None
    position_std: float = 0.1
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    radius: float | None = None
    logit_coeff: float | None = None

    def __post_init__(self) -> None:
        one_of("variant", self.variant, VARIANTS)
        one_of("pooling", self.pooling, POOLINGS)
        if self.hidden is None and isinstance(self.dim, int):
            object.__setattr__(self, "hidden", 2 * self.dim)
        self._check_sizes()
        self._check_pixels()
        self._check_ball()
        for name in ("attention_weight", "feed_forward_weight"):
            value = getattr(self, name)
            if not is_number(value) or not 0.0 < value <= 1.0:
                raise ValueError(f"{name} must be in (0, 1], got {echo(value)}")
        if not is_number(self.position_std) or self.position_std < 0.0:
            raise ValueError(f"position_std must be finite and >= 0, got {echo(self.position_std)}")

    def _check_sizes(self) -> None:
        for name in _SIZES if self.readout is None else (*_SIZES, "readout"):
            check_size(name, getattr(self, name), MOST_LAYERS if name == "num_layers" else LARGEST_SIZE)
        if self.image_size % self.patch:
            raise ValueError(
                "image_size must be a multiple of patch, got "
                f"image_size={self.image_size}, patch={self.patch}"
            )
        if self.dim % self.num_heads:
            raise ValueError(
                f"dim must be a multiple of num_heads, got dim={self.dim}, num_heads={self.num_heads}"
            )
        for name in ("hidden", "readout"):
            if (getattr(self, name) or 0) % 2:
                raise ValueError(f"{name} must be even for MaxMin, got {getattr(self, name)}")
        if self.classes < 2:
            raise ValueError(f"classes must be at least 2, got {self.classes}")
        names = (*_SIZES, "readout") if self.readout is not None else _SIZES
        check_parameters(self._parameters(), {name: getattr(self, name) for name in names})

    def _parameters(self) -> int:
        """The number of all weight matrices' entries."""
        assert self.hidden is not None
        features = self.dim * (self.tokens if self.pooling == "flatten" else 1)
        head = features * self.classes
        if self.readout is not None:
            head = features * self.readout + self.readout * self.classes
        embedding = (self.channels * self.patch**2 + self.tokens) * self.dim
        return embedding + self.num_layers * (4 * self.dim**2 + 2 * self.dim * self.hidden) + head

    def _check_pixels(self) -> None:
        for name, default in (("mean", 0.0), ("std", 1.0)):
            given = getattr(self, name)
            if given is None:
                given = (default,) * self.channels
            if (
                not isinstance(given, (list, tuple))
                or len(given) != self.channels
                or not all((is_positive if name == "std" else is_number)(v) for v in given)
            ):
                kind = "positive numbers" if name == "std" else "numbers"
                raise ValueError(f"{name} must be {self.channels} {kind}, got {echo(given)}")
            object.__setattr__(self, name, tuple(float(v) for v in given))

    def _check_ball(self) -> None:
        own = self.variant == "dot_product"
        for name, default in (("radius", 4.0), ("logit_coeff", 1.0)):
            value = getattr(self, name)
            if not own and value is not None:
                raise ValueError(f"the variant {self.variant!r} has no option {name}, got {echo(value)}")
            if own and value is None:
                object.__setattr__(self, name, default)
            elif own:
                check_positive(name, value)

    @property
    def tokens(self) -> int:
        """N, the number of patches."""
        return (self.image_size // self.patch) ** 2

    def to_dict(self) -> dict[str, Any]:
        """All entries as JSON values."""
        entries = dataclasses.asdict(self)
        return {**entries, "mean": list(entries["mean"]), "std": list(entries["std"])}

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> VisionTransformerConfig:
        """The config of :meth:`to_dict`'s entries.

        Raises:
            ValueError: an entry is unknown, missing or wrong; it says which.
        """
        return cls(**known_entries(cls, entries))
