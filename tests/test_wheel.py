"""The wheel: what it holds, what it asks for, and that it works with nothing else installed.

The empty environment is a real one, made by venv without pip. The wheel is installed into it; torch
and einops, with what they declare to require, are linked in from the environment that runs the
tests, which takes seconds where downloading torch takes minutes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


def requirements(lines: list[str] | None) -> set[str]:
    """Names of the requirements that hold here when no extra is asked for."""
    parsed = [Requirement(line) for line in lines or []]
    return {
        canonicalize_name(r.name) for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})
    }


def closure(names: set[str]) -> set[str]:
    """Those distributions and all that they require, by their own metadata."""
    seen: set[str] = set()
    todo = set(names)
    while todo:
        name = todo.pop()
        seen.add(name)
        todo |= requirements(metadata.requires(name)) - seen
    return seen


def link_distribution(name: str, site_packages: Path) -> None:
    """Links the files of one installed distribution into another site-packages directory."""
    distribution = metadata.distribution(name)
    files = distribution.files
    assert files, f"{name} does not record its files"
    for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
        link = site_packages / top
        if not link.exists():  # namespace packages are shared
            link.symlink_to(Path(str(distribution.locate_file(top))).resolve())


def readme_examples() -> list[str]:
    readme = ROOT / "README.md"
    assert readme.exists(), "README.md is missing"
    blocks = re.findall(r"^```python\n(.*?)^```$", readme.read_text(), flags=re.M | re.S)
    assert blocks, "README.md has no ```python block to run"
    return blocks


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # setuptools leaves build/ behind and would pack stale files from it: build from a clean copy,
    # with training/, recipes/ and tests/ in it, which must not get into the wheel.
    folder = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "runs")
    shutil.copytree(ROOT, folder / "source", ignore=ignore)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    pip = [sys.executable, "-m", "pip"]
    run(*pip, "wheel", *options, "--wheel-dir", folder, folder / "source", cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(path).decode())


@pytest.fixture(scope="module")
def empty_python(wheel: Path, wheel_metadata: Message) -> Path:
    """The interpreter of a venv that holds the wheel and its declared requirements alone."""
    venv = wheel.parent / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=wheel.parent)
    python = venv / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(run(python, "-c", ask, cwd=wheel.parent).strip())
    for name in closure(requirements(wheel_metadata.get_all("Requires-Dist"))):
        link_distribution(name, site_packages)
    install = ["install", "--quiet", "--no-deps", "--no-index"]
    run(sys.executable, "-m", "pip", "--python", python, *install, wheel, cwd=wheel.parent)
    return python


def test_the_wheel_holds_the_package_alone(wheel: Path, wheel_metadata: Message) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"lipformer-{wheel_metadata['Version']}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"lipformer", info}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "lipformer").rglob("*.py")}
    assert {name for name in names if name.startswith("lipformer/")} == {
        *modules,
        "lipformer/py.typed",
        "lipformer/functional/gain/table.json",
    }
    assert f"{info}/licenses/LICENSE" in names


def test_the_wheel_asks_for_torch_and_einops_alone(wheel_metadata: Message) -> None:
    assert requirements(wheel_metadata.get_all("Requires-Dist")) == {"torch", "einops"}
    assert wheel_metadata["Requires-Python"] == ">=3.10"
    assert wheel_metadata["License-Expression"] == "Apache-2.0"


def test_the_version_is_one(wheel_metadata: Message) -> None:
    version = wheel_metadata["Version"]
    assert f'__version__ = "{version}"\n' in (ROOT / "lipformer" / "__init__.py").read_text()
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version} (" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="make dist builds what is committed")
def test_two_builds_are_the_same_and_the_sdist_holds_the_recipes(tmp_path: Path) -> None:
    printed = run(sys.executable, ROOT / ".ci" / "dist.py", "--out", tmp_path, cwd=tmp_path)
    assert re.fullmatch(r"[0-9a-f]{64} \S+\.tar\.gz\n[0-9a-f]{64} \S+\.whl\n", printed)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"recipes/quickstart.yaml", "training/cli.py", "tests/oracles.py", "docs/theory.md"} <= names
    assert {"Makefile", "constraints.txt", ".ci/run"} <= names
    assert not {name for name in names if name.startswith(("data", "runs", "build", ".venv"))}


def test_the_empty_environment_is_whole_and_empty(empty_python: Path) -> None:
    run(sys.executable, "-m", "pip", "--python", empty_python, "check", cwd=empty_python.parent)
    probe = (
        "import importlib.util as u, lipformer; print(lipformer.__file__);"
        "print([n for n in ('numpy', 'scipy', 'pytest', 'matplotlib') if u.find_spec(n)])"
    )
    where, others = run(empty_python, "-c", probe, cwd=empty_python.parent).splitlines()
    assert Path(where).is_relative_to(empty_python.parents[1])
    assert others == "[]"


def test_the_self_check_passes_in_the_empty_environment(empty_python: Path) -> None:
    assert run(empty_python, "-m", "lipformer", cwd=empty_python.parent).count("passed on cpu") == 3


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_readme_examples_run_in_the_empty_environment(empty_python: Path) -> None:
    # One after another, as a reader meets them: a later one may use what an earlier one made.
    script = empty_python.parents[2] / "readme.py"
    script.write_text("\n".join(readme_examples()))
    run(empty_python, script, cwd=script.parent)
