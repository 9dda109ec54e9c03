"""Sets of points in the plane: toy shapes that move from set to set, and handwritten digits.

The points of a set share what the set does not tell: where the shape lies, how large it is, how it is
turned, or which image they come from. Given the others, a point is therefore much easier to guess
than alone, which is what attention can learn and a model of single points cannot.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import lightning as L
import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from training.batches import for_gpu


def moons(sets: int, points: int, generator: Generator) -> Tensor:
    """Two half circles, interleaved (sets, points, 2)."""
    angle = math.pi * torch.rand(sets, points, generator=generator)
    upper = torch.rand(sets, points, generator=generator) < 0.5
    x = torch.where(upper, angle.cos(), 1.0 - angle.cos()) - 0.5
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin()) - 0.25
    shape = torch.stack([x, y], -1)
    return 1.2 * (shape + 0.06 * torch.randn(shape.shape, generator=generator))


def rings(sets: int, points: int, generator: Generator) -> Tensor:
    """Two circles around one centre (sets, points, 2)."""
    angle = 2.0 * math.pi * torch.rand(sets, points, generator=generator)
    radius = torch.where(torch.rand(sets, points, generator=generator) < 0.5, 0.6, 1.4)
    shape = radius.unsqueeze(-1) * torch.stack([angle.cos(), angle.sin()], -1)
    return shape + 0.06 * torch.randn(shape.shape, generator=generator)


def checkerboard(sets: int, points: int, generator: Generator) -> Tensor:
    """The black squares of a 4 x 4 board (sets, points, 2)."""
    row = torch.randint(4, (sets, points), generator=generator)
    column = 2 * torch.randint(2, (sets, points), generator=generator) + row % 2
    corner = torch.stack([column, row], -1).float()
    return 0.85 * (corner + torch.rand(sets, points, 2, generator=generator) - 2.0)


def moved(shape: Tensor, generator: Generator, *, offset: float, stretch: float, turn: float) -> Tensor:
    """Each set shifted, scaled and turned as a whole.

    Args:
        shape: (sets, points, 2).
        generator: of the movements.
        offset: standard deviation of the shift, for each coordinate.
        stretch: standard deviation of the logarithm of the size.
        turn: largest angle, in degrees.
    """
    sets = len(shape)
    angle = math.radians(turn) * (2.0 * torch.rand(sets, generator=generator) - 1.0)
    rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1)
    size = (stretch * torch.randn(sets, 1, 1, generator=generator)).exp()
    shift = offset * torch.randn(sets, 1, 2, generator=generator)
    return size * shape @ rotation.reshape(sets, 2, 2).mT + shift


def digit_points(images: Tensor, points: int, generator: Generator) -> Tensor:
    """Points of images: a pixel by its brightness, then a uniform place inside the pixel.

    Args:
        images: (B, 8, 8), not negative.
        points: of each set.
        generator: of the draws.

    Returns:
        (B, points, 2) in about [-2, 2]; the image's rows run from top to bottom.
    """
    pixel = torch.multinomial(images.flatten(1), points, replacement=True, generator=generator)
    place = torch.stack([pixel % 8, 7 - pixel // 8], -1) + torch.rand(
        *pixel.shape, 2, generator=generator
    )
    return (place - 4.0) / 2.0


SHAPES = {"checkerboard": checkerboard, "moons": moons, "rings": rings}


def digit_images() -> tuple[Tensor, Tensor]:
    """The 1797 images of scikit-learn as (N, 8, 8): four fifths to train on, the rest to judge by."""
    from sklearn.datasets import load_digits

    images = torch.as_tensor(load_digits().images, dtype=torch.float32)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    cut = len(images) * 4 // 5
    return images[order[:cut]], images[order[cut:]]


class DigitSets(Dataset[tuple[Tensor]]):
    """Sets drawn anew from the images each time they are asked for, a whole batch at once."""

    def __init__(self, images: Tensor, points: int, sets: int, seed: int) -> None:
        self.images, self.points, self.sets = images, points, sets
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.sets

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor]]:
        with torch.device("cpu"):
            choice = torch.randint(len(self.images), (len(indices),), generator=self.generator)
            return [(x,) for x in digit_points(self.images[choice], self.points, self.generator)]


class PointSets(L.LightningDataModule):
    """Sets of points to train on and to judge by, on the CPU whatever the default device is.

    Args:
        name: "moons", "rings", "checkerboard" or "digits".
        points: of each set.
        train_sets: sets of an epoch; of the toy shapes the same ones in each.
        held_out_sets: sets to judge by (of the digits: of images that were not trained on).
        batch_size: sets of a batch.
        offset: see :func:`moved`; does not move digits, like the next two.
        stretch: see :func:`moved`.
        turn: see :func:`moved`.
        seed: of all draws.
    """

    def __init__(
        self,
        name: Literal["moons", "rings", "checkerboard", "digits"] = "moons",
        points: int = 12,
        train_sets: int = 20_000,
        held_out_sets: int = 1_000,
        batch_size: int = 64,
        offset: float = 0.3,
        stretch: float = 0.1,
        turn: float = 15.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.name = name
        self.points = points
        self.batch_size = batch_size
        self.train_set: Dataset[tuple[Tensor, ...]]
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.device("cpu"):
            if name == "digits":
                train, held_out = digit_images()
                self.train_set = DigitSets(train, points, train_sets, seed)
                choice = torch.randint(len(held_out), (held_out_sets,), generator=generator)
                self.held_out = digit_points(held_out[choice], points, generator)
            else:
                both = SHAPES[name](train_sets + held_out_sets, points, generator)
                both = moved(both, generator, offset=offset, stretch=stretch, turn=turn)
                self.train_set = TensorDataset(both[held_out_sets:])
                self.held_out = both[:held_out_sets]

    def _batches(
        self, sets: Dataset[tuple[Tensor, ...]], **options: Any
    ) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(sets, self.batch_size, pin_memory=for_gpu(self), **options)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Batches [x] with x (B, T, 2), in random order."""
        return self._batches(self.train_set, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """A part of the held-out sets, to follow the training."""
        return self._batches(TensorDataset(self.held_out[:256]))

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """All held-out sets."""
        return self._batches(TensorDataset(self.held_out))
