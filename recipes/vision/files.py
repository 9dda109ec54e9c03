"""Reading the image files that `fetch` leaves in a directory: idx files and sheets of PNG rows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.errors import BadInput


def read_idx(path: Path) -> Tensor:
    """An idx file of unsigned bytes as uint8: images (N, H, W) or labels (N,).

    Two zero bytes, the type (8), the number of dimensions, each of them as a big-endian int32, the data.
    """
    content = _bytes(path)
    dimensions = content[3] if len(content) > 3 else 0
    start = 4 + 4 * dimensions
    if content[:3] != b"\0\0\x08" or len(content) < start:
        raise BadInput(f"{path} is no idx file of unsigned bytes")
    shape = [int(size) for size in np.frombuffer(content, ">i4", dimensions, 4)]
    if len(content) != start + math.prod(shape):
        raise BadInput(
            f"{path} is truncated: {shape} needs {math.prod(shape)} bytes, got {len(content)}"
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())


def read_sheet(path: Path, size: int = 32) -> Tensor:
    """A PNG with one RGB image in each row of pixels: (N, 3, size, size), uint8."""
    from PIL import Image

    if not path.is_file():
        raise BadInput(f"there is no file {path}")
    try:
        with Image.open(path) as sheet:
            pixels = np.asarray(sheet.convert("RGB"))
    except OSError as error:
        raise BadInput(f"{path} is truncated or no image: {error}") from error
    if pixels.shape[1] != size * size:
        raise BadInput(f"{path} must be {size * size} pixels wide, got {pixels.shape[1]}")
    rows = torch.from_numpy(pixels.copy()).unflatten(1, (size, size))
    return rows.permute(0, 3, 1, 2).contiguous()


def read_labels(path: Path) -> Tensor:
    """A JSON list of whole numbers, int64."""
    try:
        labels = json.loads(_bytes(path))
        return torch.tensor(labels, dtype=torch.int64)
    except (ValueError, TypeError) as error:
        raise BadInput(f"{path} is no JSON list of labels: {error}") from error


def _bytes(path: Path) -> bytes:
    if not path.is_file():
        raise BadInput(f"there is no file {path}")
    return path.read_bytes()
