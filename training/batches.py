"""Batches whose order is a function of seed, epoch and number, so that each can be reproduced."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor

from training.errors import BadInput
from training.windows import Batch, Windows


def derive_seed(*numbers: int) -> int:
    """One seed of several numbers, in [0, 2^63)."""
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(*numbers))


def for_gpu(data: L.LightningDataModule) -> bool:
    """Whether batches go to a GPU: from pinned memory, so that the host does not wait for the copy."""
    return data.trainer is not None and data.trainer.strategy.root_device.type != "cpu"


class TrainingBatches:
    """Shuffled windows for ever, one pass of them in each epoch; each process gets its own part.

    The windows of a batch, over all processes, do not depend on the number of processes: one process
    with batch size 64 learns from what two with batch size 32 learn from.

    It holds no position of its own. Which epoch it is and how many of its batches are done is asked of
    the Trainer, whose counters are in every checkpoint, when the first batch is taken: so a resumed run
    continues with the batch after the checkpoint's last. (Lightning alone restarts the epoch.)

    Args:
        windows: gives an epoch's windows, of equal number, for a generator.
        batch_size: of each process.
        seed: of the order.
        progress: epoch and number of its batches that are done.
        rank, world: which of how many processes.
        fingerprint: what must be the same when a run is resumed.
    """

    def __init__(
        self,
        windows: Callable[[torch.Generator], Windows],
        batch_size: int,
        seed: int,
        progress: Callable[[], tuple[int, int]],
        rank: int = 0,
        world: int = 1,
        fingerprint: dict[str, Any] | None = None,
    ) -> None:
        self.windows, self.seed, self.progress = windows, seed, progress
        self.batch_size, self.rank, self.world = batch_size, rank, world
        self.fingerprint = {**(fingerprint or {}), "batch_size": batch_size * world, "seed": seed}
        self.count = len(windows(_generator(seed, 0)))

    def __len__(self) -> int:
        return self.count // (self.batch_size * self.world)

    def __iter__(self) -> Iterator[Batch]:
        # The body of a generator runs when its first item is asked for: the counters are final then.
        epoch, done = self.progress()
        windows, order = self.epoch(epoch)
        for index in order[done:]:
            # In float64 and here, so that each process has the same number.
            share = float(windows.lengths[index].sum()) / self.world
            own = index[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]
            yield windows.batch(own, share)

    def epoch(self, epoch: int) -> tuple[Windows, Tensor]:
        """The windows of an epoch and the order of their numbers, (batches, world * batch_size)."""
        generator = _generator(self.seed, epoch)
        windows = self.windows(generator)
        size = self.batch_size * self.world
        where = windows.codes.device
        order = torch.randperm(len(windows), generator=generator, device=where)[: len(self) * size]
        if bool((windows.lengths != windows.lengths[0]).any()):
            # Windows of like length together, so that little is padded; ties stay shuffled.
            order = order[windows.lengths[order].argsort(stable=True)]
            shuffled = torch.randperm(len(self), generator=generator, device=where)
            order = order.reshape(-1, size)[shuffled]
        return windows, order.reshape(-1, size)

    def state_dict(self) -> dict[str, Any]:
        """What must not change for the order to go on."""
        return dict(self.fingerprint)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuses a checkpoint of other batches."""
        for name, value in self.fingerprint.items():
            if state.get(name) != value:
                raise BadInput(
                    f"the checkpoint's run cannot be resumed: its {name} was {state.get(name)!r}, now "
                    f"it is {value!r}. Resume with the settings it began with, or start anew from its "
                    "weights: python -m training export, then --model.pretrained"
                )


class EvaluationBatches:
    """Every window once, in order of length; all processes get equally many batches.

    What is missing is filled up with empty windows, which count for nothing.
    """

    def __init__(self, windows: Windows, batch_size: int, rank: int = 0, world: int = 1) -> None:
        self.windows, self.batch_size, self.rank, self.world = windows, batch_size, rank, world

    def __len__(self) -> int:
        return -(-len(self.windows) // (self.batch_size * self.world))

    def __iter__(self) -> Iterator[Batch]:
        order = self.windows.lengths.argsort(stable=True, descending=True)
        size = self.batch_size * self.world
        filler = order.new_full((len(self) * size - len(order),), -1)
        for index in torch.cat([order, filler]).reshape(-1, size):
            own = index[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]
            counted = own[own >= 0]
            yield self.windows.batch(own, float(self.windows.lengths[counted].sum()))
