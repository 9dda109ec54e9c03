"""What an event is in the hands of another library, and how it becomes tokens (B, T, D)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

# Where the axis goes that a vector lacks: one token of its features, or a token for each of them.
VECTORS = {"token": -2, "tokens": -1}


class Size(NamedTuple):
    """What is known of one size of an event.

    A base of fixed shape takes a size of 1 for any other, by broadcasting, and gives a wrong density.
    So 1 must be known to be meant.
    """

    name: str
    known: int | None
    largest: int | None = None

    def allows(self, n: int) -> bool:
        """Whether an event may be of size n, if that is its size."""
        return n >= 1 and self.known in (None, n) and (self.largest is None or n <= self.largest)

    def fits(self, n: int) -> bool:
        """Whether an event may be of size n, if nothing is said of it."""
        return self.allows(n) and (n > 1 or self.known == 1)

    def __str__(self) -> str:
        if self.known is not None:
            return str(self.known)
        return self.name if self.largest is None else f"{self.name} <= {self.largest}"


class Events:
    """Events (T, D) of a block, or vectors, after the dimensions of a batch.

    Args:
        block: an invertible module, which may know the largest T (the ``seq_len`` of its parts) and D
            (its ``dim``).
        vectors: None for events (T, D); "token" for vectors (D,) that are one token, "tokens" for
            vectors (T,) of tokens with one feature.
        shape: of the host's events, if it is known.
        single: batches are (B, *event), else of any number of dimensions.
    """

    def __init__(
        self,
        block: nn.Module,
        vectors: str | None,
        shape: Sequence[int] | None = None,
        *,
        single: bool = False,
    ) -> None:
        if vectors is not None and vectors not in VECTORS:
            raise ValueError(f"vectors must be None or one of {', '.join(VECTORS)}, got {vectors!r}")
        dim: int | None = getattr(block, "dim", None)
        if vectors == "tokens" and dim not in (None, 1):
            raise ValueError(f"vectors='tokens' makes tokens of 1 feature, the block takes {dim}")
        lengths = (getattr(part, "seq_len", None) for part in block.modules())
        largest = min((n for n in lengths if n is not None), default=None)
        tokens, features = Size("T", 1 if largest == 1 else None, largest), Size("D", dim)
        self.sizes = {None: [tokens, features], "token": [features], "tokens": [tokens]}[vectors]
        self.vectors = vectors
        self.single = single
        if shape is not None:
            if len(shape) != self.ndim or not self._all(Size.allows, shape):
                hint = ": vectors='token' or 'tokens' takes vectors" if len(shape) == 1 else ""
                raise ValueError(f"events have shape {self._wanted()}, got {tuple(shape)}{hint}")
            self.sizes = [Size(size.name, n) for size, n in zip(self.sizes, shape, strict=True)]

    @property
    def ndim(self) -> int:
        """Dimensions of an event: 2, or 1 of a vector."""
        return len(self.sizes)

    def check(self, shape: Sequence[int]) -> None:
        """Raises, with both shapes, unless a tensor of this shape is a batch of events."""
        batch, event = shape[: -self.ndim], shape[-self.ndim :]
        if len(shape) < self.ndim or (self.single and len(batch) != 1):
            raise self._refused(shape, self._readings(shape))
        if not self._all(Size.fits, event):
            hint = f": 1 would fit any base, so say event_shape={tuple(event)} if it is meant"
            raise self._refused(shape, hint if self._all(Size.allows, event) else "")

    def check_data(self, shape: Sequence[int]) -> None:
        """As :meth:`check`, and data without a batch must be as long as events are known to be.

        Noise without a batch is what a base draws, an event by its shape. But data (N, D) may be N
        samples as well as one event.
        """
        self.check(shape)
        first = self.sizes[0]
        if len(shape) == self.ndim and shape[0] != (first.known or first.largest):
            raise self._refused(shape, self._readings(shape))

    def tokens(self, x: Tensor) -> Tensor:
        """A batch of events as tokens (B, T, D)."""
        self.check(x.shape)
        tokens = x if self.vectors is None else x.unsqueeze(VECTORS[self.vectors])
        return tokens.reshape(-1, *tokens.shape[-2:])

    def _all(self, holds: Callable[[Size, int], bool], event: Sequence[int]) -> bool:
        return all(map(holds, self.sizes, event))

    def _wanted(self, *batch: str) -> str:
        sizes = [*batch, *map(str, self.sizes)]
        return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"

    def _refused(self, shape: Sequence[int], hint: str) -> ValueError:
        wanted = self._wanted("B" if self.single else "*")
        return ValueError(f"events have shape {wanted}, got {tuple(shape)}{hint}")

    def _readings(self, shape: Sequence[int]) -> str:
        """How else a tensor without a batch may be read."""
        if self.vectors is not None or len(shape) != 2:
            return ""
        n, dim = shape
        return (
            f": give (1, {n}, {dim}) for one event of {n} tokens; for {n} vectors of {dim} features "
            "tell the adapter vectors='token', if each is a token, or 'tokens', if each feature is"
        )
