"""Images to classify: scikit-learn's digits (no network), MNIST, CIFAR-10 and SVHN."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset

from training import corpus
from training.batches import for_gpu
from training.errors import BadInput, first_line


class LabelledImages(NamedTuple):
    """Images (N, C, H, W) as uint8 and their labels (N,) as int64."""

    images: Tensor
    labels: Tensor

    def part(self, index: Tensor | slice) -> LabelledImages:
        """Some of them."""
        return LabelledImages(self.images[index], self.labels[index])


@dataclass(frozen=True)
class DatasetInfo:
    """What is known of a data set.

    Attributes:
        image_size: pixels in each direction.
        channels: 1 or 3.
        white: the largest value of a pixel, which becomes 1.
        mean: of the training pixels in [0, 1], for each channel.
        std: over all channels: one number, since the certificate divides by the smallest.
    """

    image_size: int
    channels: int
    white: int
    mean: tuple[float, ...]
    std: float
    num_classes: int = 10


DATASETS = {
    "digits": DatasetInfo(8, 1, 16, (0.305,), 0.376),
    "mnist": DatasetInfo(28, 1, 255, (0.131,), 0.308),
    "cifar10": DatasetInfo(32, 3, 255, (0.491, 0.482, 0.447), 0.251),
    # As commonly given, not measured here: certificates hold with any.
    "svhn": DatasetInfo(32, 3, 255, (0.438, 0.444, 0.473), 0.198),
}


def digits() -> tuple[LabelledImages, LabelledImages]:
    """The 1797 images of scikit-learn: four fifths to train with, the rest to judge by."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    every = LabelledImages(
        torch.as_tensor(bunch.images).to(torch.uint8)[:, None], torch.as_tensor(bunch.target).long()
    )
    order = torch.randperm(len(every.labels), generator=Generator().manual_seed(0))
    cut = len(order) * 4 // 5
    return every.part(order[:cut]), every.part(order[cut:])


def read_idx(path: Path) -> Tensor:
    """An idx file of unsigned bytes as uint8: images (N, H, W) or labels (N,).

    Two zero bytes, the type (8), the number of dimensions, each of them as a big-endian int32, the data.
    """
    content = path.read_bytes()
    shape = np.frombuffer(content, ">i4", content[3], 4)
    return torch.from_numpy(
        np.frombuffer(content, np.uint8, offset=4 + shape.nbytes).reshape(shape).copy()
    )


def read_sheet(path: Path) -> Tensor:
    """A PNG with one RGB image of 32 x 32 in each row of pixels: (N, 3, 32, 32), uint8."""
    from PIL import Image

    with Image.open(path) as sheet:
        pixels = np.asarray(sheet.convert("RGB"))
    rows = torch.from_numpy(pixels.copy()).unflatten(1, (32, 32))
    return rows.permute(0, 3, 1, 2).contiguous()


def from_directory(name: str, directory: str | Path) -> tuple[LabelledImages, LabelledImages]:
    """Training and test images of the files that `recipes.vision.fetch` unpacks.

    Raises:
        BadInput: they are not there, or not whole.
    """
    folder = Path(directory)
    try:
        if name == "mnist":
            train, test = (
                LabelledImages(
                    read_idx(folder / f"{part}-images-idx3-ubyte")[:, None],
                    read_idx(folder / f"{part}-labels-idx1-ubyte").long(),
                )
                for part in ("train", "t10k")
            )
            return train, test
        train_labels, test_labels = (
            torch.tensor(json.loads((folder / f"{part}_lables.json").read_bytes()))
            for part in ("train", "test")
        )
        sheets = [read_sheet(folder / f"data_batch_{i}.png") for i in range(1, 6)]
        return (
            LabelledImages(torch.cat(sheets), train_labels),
            LabelledImages(read_sheet(folder / "test_batch.png"), test_labels),
        )
    except (OSError, ValueError, IndexError, RuntimeError) as error:
        raise BadInput(
            f"--data.directory must hold the files of {name}, got {str(directory)!r} "
            f"({first_line(error)}); fill one with python -m recipes.vision.fetch {name} {folder}"
        ) from error


def from_hub(
    path: str, channels: int, config: str | None = None
) -> tuple[LabelledImages, LabelledImages]:
    """Training and test images of a data set with an image and a label in each row, by `datasets`."""
    import datasets

    def read(split: str) -> LabelledImages:
        rows: Any = corpus.read(path, config)[split]
        image = next((n for n, kind in rows.features.items() if isinstance(kind, datasets.Image)), None)
        if image is None or "label" not in rows.features:
            raise BadInput(f"{path} needs an image and a label in each row, has {list(rows.features)}")
        mode = "L" if channels == 1 else "RGB"
        stack = np.stack([np.asarray(picture.convert(mode)) for picture in rows[image]])
        images = torch.from_numpy(stack).unflatten(2, (stack.shape[2],))
        images = images[:, None] if channels == 1 else images.permute(0, 3, 1, 2).contiguous()
        return LabelledImages(images, torch.tensor(rows["label"], dtype=torch.int64))

    return read("train"), read("test")


class ImageDataset(Dataset[tuple[Tensor, Tensor]]):
    """Images in [0, 1] with their labels, a whole batch at once, shifted and flipped if asked.

    Args:
        source: the images.
        white: the value that becomes 1.
        shift: most pixels that an image is moved by, in each direction, with black beyond its edges.
        flip: mirror every image with probability 1/2.
    """

    def __init__(self, source: LabelledImages, white: int, shift: int = 0, flip: bool = False) -> None:
        self.source, self.white, self.shift, self.flip = source, white, shift, flip

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        with torch.device("cpu"):
            images, labels = self.source.part(torch.tensor(indices))
            x = self.moved(images.float() / self.white)
        return list(zip(x, labels, strict=True))

    def moved(self, x: Tensor) -> Tensor:
        """Each image shifted and flipped at random, (B, C, H, W)."""
        count, _, height, width = x.shape
        if self.flip:
            flip = torch.rand(count, 1, 1, 1) < 0.5
            x = torch.where(flip, x.flip(-1), x)
        if self.shift:
            reach = 2 * self.shift + 1
            top, left = torch.randint(reach, (2, count))
            padded = F.pad(x, (self.shift,) * 4)
            row = (top[:, None] + torch.arange(height))[:, None, :, None]
            column = (left[:, None] + torch.arange(width))[:, None, None, :]
            sample = torch.arange(count)[:, None, None, None]
            x = padded[sample, torch.arange(x.shape[1])[None, :, None, None], row, column]
        return x


class ImageData(L.LightningDataModule):
    """Images to train on, to follow the training by, and to judge by.

    A tenth of the training images (at most 5000) is held out for validation; the test images are used
    by the report alone.

    Args:
        name: "digits" (scikit-learn), "mnist", "cifar10" or "svhn" (by hub alone).
        directory: of the files of MNIST or CIFAR-10, see recipes/vision/fetch.py.
        hub: a data set by its name on the hub or by a local path, read by `datasets`, instead.
        hub_config: which of its configurations, where it has several ("cropped_digits" of SVHN).
        batch_size: images of a batch.
        shift: most pixels that training images are moved by, in each direction.
        flip: mirror training images with probability 1/2.
        train_images: use only so many training images.
        test_images: judge by the first so many test images.
    """

    def __init__(
        self,
        name: Literal["digits", "mnist", "cifar10", "svhn"] = "digits",
        directory: str | None = None,
        hub: str | None = None,
        hub_config: str | None = None,
        batch_size: PositiveInt = 128,
        shift: NonNegativeInt = 0,
        flip: bool = False,
        train_images: PositiveInt | None = None,
        test_images: PositiveInt | None = None,
    ) -> None:
        super().__init__()
        given = [option for option in (directory, hub) if option is not None]
        if (name == "digits" and given) or len(given) > 1 or (name == "svhn" and directory is not None):
            raise BadInput(
                "--data.directory or --data.hub says where mnist and cifar10 are, --data.hub where svhn "
                "is; digits need none. Got "
                f"name={name}, directory={directory}, hub={hub}"
            )
        self.name, self.directory, self.hub, self.hub_config = name, directory, hub, hub_config
        self.batch_size, self.shift, self.flip = batch_size, shift, flip
        self.train_images, self.test_images = train_images, test_images
        self.about = DATASETS[name]
        self.parts: dict[str, LabelledImages] = {}

    def setup(self, stage: str) -> None:
        """Reads the images, once, into the CPU's memory."""
        if self.parts:
            return
        with torch.device("cpu"):
            train, test = self._read()
        for part in (train, test):
            self._check(part)
        held_out = min(5000, len(train.labels) // 10)
        seen = train.part(slice(held_out, None)).part(slice(self.train_images))
        self.parts = {
            "train": seen,
            "val": train.part(slice(held_out)),
            "test": test.part(slice(self.test_images)),
        }

    def _read(self) -> tuple[LabelledImages, LabelledImages]:
        if self.name == "digits":
            return digits()
        if self.directory is not None:
            return from_directory(str(self.name), self.directory)
        if self.hub is not None:
            return from_hub(self.hub, self.about.channels, self.hub_config)
        if self.name == "svhn":
            raise BadInput("svhn needs --data.hub, ufldl-stanford/svhn or a directory with a copy of it")
        raise BadInput(
            f"{self.name} needs --data.directory (python -m recipes.vision.fetch {self.name} "
            "DIRECTORY fills one) or --data.hub"
        )

    def _check(self, part: LabelledImages) -> None:
        size, channels = self.about.image_size, self.about.channels
        images, labels = part
        if images.shape[1:] != (channels, size, size) or len(images) != len(labels):
            raise BadInput(
                f"{self.name} has images {(channels, size, size)} and as many labels, got "
                f"{tuple(images.shape)} and {len(labels)} labels"
            )
        if len(labels) == 0 or not 0 <= int(labels.min()) <= int(labels.max()) < self.about.num_classes:
            raise BadInput(f"labels of {self.name} must be 0..{self.about.num_classes - 1}")

    def images(self, part: str, count: int | None = None) -> tuple[Tensor, Tensor]:
        """The first images of a part, in [0, 1], and their labels."""
        images, labels = self.parts[part].part(slice(count))
        return images.float() / self.about.white, labels

    def _batches(self, dataset: ImageDataset, **options: Any) -> DataLoader[tuple[Tensor, Tensor]]:
        size = min(self.batch_size, len(dataset))
        return DataLoader(dataset, size, pin_memory=for_gpu(self), **options)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Batches of images and labels in random order."""
        dataset = ImageDataset(self.parts["train"], self.about.white, self.shift, self.flip)
        return self._batches(dataset, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """The held-out training images."""
        return self._batches(ImageDataset(self.parts["val"], self.about.white))

    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """The test images."""
        return self._batches(ImageDataset(self.parts["test"], self.about.white))
