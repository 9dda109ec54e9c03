"""Sets of points with noisy labels: clusters share the true label, which one point alone cannot know."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from training.batches import for_gpu

FEATURES = 4
"""Of a point: its place in space and the label it carries."""


def noisy_sets(
    sets: int,
    points: int,
    generator: Generator | None = None,
    *,
    clusters: int = 3,
    spread: float = 0.1,
    label: float = 0.5,
    flip: float = 0.25,
) -> tuple[Tensor, Tensor]:
    """Sets of points and the true label of each point.

    Each set has clusters around random places of the unit sphere. A cluster has one true label, 0 or 1;
    each of its points carries it, flipped with a probability, as the last feature. All draws are
    independent: which cluster a point is of, centres, labels and flips.

    Args:
        sets: S.
        points: N, of each set.
        generator: of all draws, on the CPU; default torch's.
        clusters: of each set.
        spread: standard deviation of a point's place around its centre, for each coordinate.
        label: the last feature is this for 1 and minus this for 0.
        flip: the probability.

    Returns:
        (S, N, 4) in float32 and (S, N) in int64.
    """
    centres = F.normalize(torch.randn(sets, clusters, FEATURES - 1, generator=generator), dim=-1)
    labels = torch.randint(2, (sets, clusters), generator=generator)
    member = torch.randint(clusters, (sets, points), generator=generator)
    centre = centres.gather(1, member[..., None].expand(-1, -1, FEATURES - 1))
    place = centre + spread * torch.randn(centre.shape, generator=generator)
    true = labels.gather(1, member)
    flipped = torch.rand(sets, points, generator=generator) < flip
    carried = label * (2.0 * (true ^ flipped.long()) - 1.0)
    return torch.cat([place, carried[..., None]], -1), true


class NewSets(Dataset[tuple[Tensor, Tensor]]):
    """Sets that are drawn anew, by torch's generator, each time they are asked for: a batch at once."""

    def __init__(self, sets: int, points: int, **options: Any) -> None:
        self.sets, self.points, self.options = sets, points, options

    def __len__(self) -> int:
        return self.sets

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        with torch.device("cpu"):
            return list(zip(*noisy_sets(len(indices), self.points, **self.options), strict=True))


class NoisySets(L.LightningDataModule):
    """Sets to train on, always new ones, to follow the training by, and to judge by.

    Args:
        points: of each set.
        clusters: of each set.
        spread: of a cluster, see :func:`noisy_sets`.
        label: size of the last feature.
        flip: probability that a point carries the wrong label.
        batch_size: sets of a batch.
        train_sets: sets of an epoch.
        val_sets: sets to follow the training and to choose settings by.
        test_sets: sets that the report alone uses.
        seed: of the last two; training sets follow seed_everything.
    """

    def __init__(
        self,
        points: PositiveInt = 256,
        clusters: PositiveInt = 3,
        spread: NonNegativeFloat = 0.1,
        label: PositiveFloat = 0.5,
        flip: ClosedUnitInterval = 0.25,
        batch_size: PositiveInt = 16,
        train_sets: PositiveInt = 6400,
        val_sets: PositiveInt = 200,
        test_sets: PositiveInt = 500,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.points, self.clusters, self.flip, self.batch_size = points, clusters, flip, batch_size
        options = {"clusters": clusters, "spread": spread, "label": label, "flip": flip}
        self.train_set = NewSets(train_sets, points, **options)
        generator = Generator().manual_seed(seed)
        with torch.device("cpu"):
            self.val = noisy_sets(val_sets, points, generator, **options)
            self.test = noisy_sets(test_sets, points, generator, **options)

    def _batches(self, sets: Dataset[Any], **options: Any) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(sets, self.batch_size, pin_memory=for_gpu(self), **options)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Batches [x, y] with x (B, N, 4) and y (B, N)."""
        return self._batches(self.train_set, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """The sets to follow the training by."""
        return self._batches(TensorDataset(*self.val))

    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """The sets to judge by."""
        return self._batches(TensorDataset(*self.test))
