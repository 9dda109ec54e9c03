"""Characters of a text as training batches."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


def embedded_text() -> str:
    """About 465 thousand characters of English that come with Python itself."""
    return "\n".join(pydoc_data.topics.topics.values())


@dataclass(frozen=True)
class Characters:
    """A text as integers, split into a part to train on and a part to judge by.

    Attributes:
        symbols: the distinct characters, sorted; a character's index is its number.
        train: the first nine tenths of the text, (T,) int64.
        valid: the rest.
    """

    symbols: str
    train: Tensor
    valid: Tensor

    @classmethod
    def of(cls, text: str) -> Characters:
        """Numbers the characters of a text."""
        if len(text) < 20:
            raise ValueError(f"the text must have at least 20 characters, got {len(text)}")
        symbols = "".join(sorted(set(text)))
        number = {symbol: i for i, symbol in enumerate(symbols)}
        codes = torch.tensor([number[symbol] for symbol in text])
        cut = len(codes) * 9 // 10
        return cls(symbols, codes[:cut], codes[cut:])

    def batches(
        self, length: int, size: int, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Random blocks of the training text for ever: input and next characters (size, length)."""
        if len(self.train) <= length:
            raise ValueError(
                f"the training text has {len(self.train)} characters, fewer than {length + 1}"
            )
        while True:
            starts = torch.randint(len(self.train) - length, (size, 1), generator=generator)
            block = self.train[starts + torch.arange(length + 1)]
            yield block[:, :-1], block[:, 1:]

    def judged(self, length: int, size: int) -> tuple[Tensor, Tensor]:
        """The first blocks of the held-out text: input and next characters (size, length)."""
        if len(self.valid) <= length * size:
            raise ValueError(
                f"the held-out text has {len(self.valid)} characters, not {length * size + 1}"
            )
        block = self.valid[: length * size + 1]
        return block[:-1].reshape(size, length), block[1:].reshape(size, length)
