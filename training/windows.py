"""A text cut into windows: blocks of a stream, or sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Targets that count for nothing, as in torch's cross_entropy.
IGNORE_INDEX = -100
# Sentences are padded to multiples of this, so that a compiled model sees few shapes.
_STEP = 32


class Batch(NamedTuple):
    """Windows of a text, padded at the end to one length N.

    Attributes:
        inputs: (B, N) int64; what pads comes after every real symbol, where a causal model cannot
            see it.
        targets: (B, N) int64, the next symbols; `IGNORE_INDEX` where the window has ended.
        symbols: scalar; a process's share of the symbols that the whole batch predicts, over all
            processes: what the sum of losses is divided by, so that their mean over processes is the
            mean over symbols.
    """

    inputs: Tensor
    targets: Tensor
    symbols: Tensor


@dataclass(frozen=True)
class Windows:
    """Windows [a, a + n) of a text: symbol t is predicted from those in [a - 1, t).

    All of it is where the text's codes are: on the CPU, whatever the default device is.

    Attributes:
        codes: (T,) int64.
        starts: (M,), each a >= 1.
        lengths: (M,), each n >= 1.
        step: batches are padded to multiples of it.
    """

    codes: Tensor
    starts: Tensor
    lengths: Tensor
    step: int = 1

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, index: Tensor, share: float) -> Batch:
        """The windows of index (B,); negative entries give empty ones.

        Args:
            index: which windows.
            share: of the symbols, for `Batch.symbols`.
        """
        lengths = torch.where(index < 0, 0, self.lengths[index.clamp_min(0)])
        longest = max(int(lengths.max()), 1)
        padded = -(-longest // self.step) * self.step
        place = torch.arange(padded, device=index.device)
        inside = place < lengths[:, None]
        at = (self.starts[index.clamp_min(0)][:, None] + place).clamp_max(len(self.codes) - 1)
        inputs = torch.where(inside, self.codes[at - 1], 0)
        targets = torch.where(inside, self.codes[at], IGNORE_INDEX)
        return Batch(inputs, targets, torch.tensor(share, device=index.device))


def stream(codes: Tensor, block: int, offset: int = 0) -> Windows:
    """Blocks of equal length one after the other; the rest of the text, if any, is left out.

    Args:
        codes: (T,).
        block: symbols predicted in each window.
        offset: where the first one begins; less than block.

    Returns:
        As many windows for each offset.
    """
    count = (len(codes) - block) // block
    starts = 1 + offset + block * torch.arange(max(count, 0), device=codes.device)
    return Windows(codes, starts, torch.full_like(starts, block))


def whole_stream(codes: Tensor, block: int) -> Windows:
    """Blocks that predict every symbol but the first, the last block being shorter."""
    starts = torch.arange(1, len(codes), block, device=codes.device)
    return Windows(codes, starts, (len(codes) - starts).clamp_max(block))


def sentences(codes: Tensor, newline: int, block: int) -> Windows:
    """A window for each line with its newline; lines longer than block are cut.

    The first line is predicted from a newline in front of it, as all others are.

    Args:
        codes: (T,), ending with a newline.
        newline: its number.
        block: the longest window.
    """
    codes = torch.cat([codes.new_tensor([newline]), codes])
    ends = (codes == newline).nonzero().flatten()
    begin, length = ends[:-1] + 1, ends.diff()
    pieces = -(-length // block)
    every = torch.arange(int(pieces.sum()), device=codes.device)
    piece = every - (pieces.cumsum(0) - pieces).repeat_interleave(pieces)
    starts = begin.repeat_interleave(pieces) + block * piece
    lengths = (length.repeat_interleave(pieces) - block * piece).clamp_max(block)
    return Windows(codes, starts, lengths, min(_STEP, block))
