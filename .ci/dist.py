"""Builds sdist and wheel of the last commit in dist/, twice, and checks that they are the same bytes.

Run by `make dist`. The time of every file is that of the commit (or SOURCE_DATE_EPOCH), so that whoever
builds the commit with the same setuptools gets the same hashes. The wheel is built from the sdist.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = """
import sys
from setuptools import build_meta
getattr(build_meta, f"build_{sys.argv[1]}")(sys.argv[2])
"""


def unpack(archive: bytes, folder: Path) -> None:
    """Unpacks a tar file."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


def repack(path: Path, epoch: int) -> None:
    """Writes a .tar.gz anew, without what setuptools takes from clock and user."""
    with tarfile.open(path) as old:
        members = sorted(old.getmembers(), key=lambda member: member.name)
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as new:
            for member in members:
                member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.pax_headers = {}
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=epoch) as packed:
        packed.write(content.getvalue())


def build(commit: bytes, folder: Path, epoch: int) -> list[Path]:
    """The sdist and the wheel, built below a folder from the archive of a commit."""
    out = folder / "dist"
    out.mkdir(parents=True)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}

    def run(kind: str, source: Path) -> None:
        command = [sys.executable, "-c", BUILD, kind, str(out)]
        subprocess.run(command, cwd=source, env=environment, check=True, stdout=subprocess.DEVNULL)

    unpack(commit, folder / "commit")
    run("sdist", folder / "commit")
    (sdist,) = out.glob("*.tar.gz")
    repack(sdist, epoch)
    unpack(sdist.read_bytes(), folder)
    run("wheel", folder / sdist.name.removesuffix(".tar.gz"))
    return [sdist, *out.glob("*.whl")]


def main() -> int:
    """Prints the hashes; 1 if two builds differ."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    out: Path = parser.parse_args().out
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "archive", "HEAD"], check=True, capture_output=True).stdout
    time = subprocess.run([*git, "log", "-1", "--format=%ct"], check=True, capture_output=True).stdout
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", time))
    os.umask(0o022)  # wheels keep the modes of files
    same = True
    with tempfile.TemporaryDirectory() as name:
        pairs = zip(*(build(commit, Path(name) / part, epoch) for part in ("a", "bb/b")), strict=True)
        for first, second in pairs:
            hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (first, second)]
            print(*hashes[:1] if hashes[0] == hashes[1] else ("DIFFER", *hashes), first.name)
            same &= hashes[0] == hashes[1]
            out.mkdir(parents=True, exist_ok=True)
            shutil.copy(first, out)
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
