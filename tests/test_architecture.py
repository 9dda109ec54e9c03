"""The rules of the code base that no single module can check: layering, public names, imports.

The rules are checked on the syntax tree, so an import inside a function or under TYPE_CHECKING
counts too; each checker has a negative control that shows it can fail.
"""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lipformer"

# Imports go one way: a layer may import itself and whatever has a lower rank.
RANKS = {
    layer: rank
    for rank, layer in enumerate(
        (
            "lipformer.functional",
            "lipformer.estimates",
            "lipformer.certificate",
            "lipformer.layers",
            "lipformer.saving",
            "lipformer.flows",
            "lipformer.models",
            "lipformer.analysis",
            "lipformer",  # the root re-exports them all, so nothing inside the package imports it
            "lipformer.__main__",
            "training",
            "recipes",
        )
    )
}
RUNTIME = {"lipformer", "torch", "einops"}
# Where an optional package may be imported, inside the function that needs it.
OPTIONAL_IMPORTS = ("lipformer.saving", "lipformer.flows", "lipformer.analysis", "lipformer.models")
MAX_LINES = 600
# torch has loaded about 1,100 modules by then; a compiler or a plotting stack adds hundreds more.
MAX_NEW_MODULES = 60


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str | None:
    """The entry of RANKS that a dotted name belongs to; None for a package that is not ours."""
    parts = module.split(".")
    if parts[0] != "lipformer":
        return parts[0] if parts[0] in RANKS else None
    return ".".join(parts[:2])


def imports(tree: ast.AST, package: str) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement in a tree with the absolute dotted name that it reads.

    Args:
        tree: the module, or a part of it.
        package: the package that relative imports start from.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                stem = package.split(".")
                parents = stem[: len(stem) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            # `from lipformer import layers` reads a layer, `from lipformer import certify` the root
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield node, name if name in RANKS else base


def package_of(path: Path) -> str:
    name = module_name(path)
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


def backward_imports(source: str, module: str, package: str) -> list[str]:
    own = layer_of(module)
    assert own in RANKS, f"{module} belongs to none of the layers {sorted(RANKS)}: give it a place"
    found = []
    for node, target in imports(ast.parse(source), package):
        layer = layer_of(target)
        if layer is None:
            continue
        assert layer in RANKS, f"{module}:{node.lineno} imports {target}, which has no layer"
        if RANKS[layer] > RANKS[own]:
            found.append(f"{module}:{node.lineno} imports {target} (layer {layer})")
    return found


def private_imports(source: str, module: str, package: str) -> list[str]:
    """Imports of another of our packages that go through a name with an underscore."""
    found = []
    for node, target in imports(ast.parse(source), package):
        layer = layer_of(target)
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        private = [name for name in (*target.split("."), *names) if name.startswith("_")]
        if private and layer is not None and layer != layer_of(module):
            found.append(f"{module}:{node.lineno} imports {target} {private}")
    return found


def foreign_imports(source: str, module: str) -> list[str]:
    """Imports of what is neither the standard library nor a runtime dependency."""
    tree = ast.parse(source)
    lazy: set[ast.stmt] = set()
    if module.startswith(OPTIONAL_IMPORTS):
        functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
        lazy = {node for function in functions for node, _ in imports(function, module)}
    return [
        f"{module}:{node.lineno} imports {target}"
        for node, target in imports(tree, module)
        if node not in lazy and target.partition(".")[0] not in RUNTIME | sys.stdlib_module_names
    ]


def data_and_version_uses(source: str) -> list[str]:
    """Uses of `._version`, and writes through `.data`: both get past autograd's bookkeeping."""

    def is_data(node: ast.AST) -> bool:
        while isinstance(node, ast.Subscript):
            node = node.value
        return isinstance(node, ast.Attribute) and node.attr == "data"

    found = []
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [leaf for t in node.targets for leaf in getattr(t, "elts", [t])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr  # an in-place method: w.data.mul_(2)
            targets = [node.func.value] if name.endswith("_") and not name.endswith("__") else []
        elif isinstance(node, ast.Attribute) and node.attr == "_version":
            found.append(f"line {node.lineno} uses ._version")
        found += [f"line {t.lineno} writes through .data" for t in targets if is_data(t)]
    return found


def bound_names(path: Path) -> set[str]:
    """Public names that an __init__.py binds to something of ours (not to a package of others)."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            base = next(target for _, target in imports(node, package_of(path)))
            if base.partition(".")[0] == "lipformer":
                names |= {alias.asname or alias.name for alias in node.names}
    return {name for name in names if not name.startswith("_")}


LIBRARY = sources("lipformer")
PUBLIC_PACKAGES = [
    path for path in LIBRARY if path.name == "__init__.py" and "._" not in module_name(path)
]


def test_the_rules_below_see_the_library() -> None:
    assert {"lipformer", "lipformer.functional", "lipformer.certificate", "lipformer.layers"} <= {
        module_name(path) for path in PUBLIC_PACKAGES
    }


@pytest.mark.parametrize("path", sources("lipformer", "training", "recipes"), ids=module_name)
def test_imports_go_one_way(path: Path) -> None:
    found = backward_imports(path.read_text(), module_name(path), package_of(path))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from lipformer.layers import L2MultiheadAttention", "lipformer.functional.gain.minimum"),
        ("from lipformer import layers", "lipformer.certificate.certify"),
        ("import lipformer.certificate.tree as tree", "lipformer.functional.gain.minimum"),
        ("from ..layers import linear", "lipformer.certificate.rules"),
        ("from .. import layers", "lipformer.certificate.rules"),
        ("from lipformer import certify", "lipformer.layers.linear"),
        ("from .. import certify", "lipformer.layers.linear"),
        ("def f():\n    from lipformer.flows import AttentionFlow", "lipformer.layers.linear"),
        ("import training", "lipformer.models.language_model"),
        ("from recipes.cli import RecipeCLI", "training.__main__"),
    ],
)
def test_a_backward_import_is_found(source: str, module: str) -> None:
    assert backward_imports(source, module, package=module.rpartition(".")[0])


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from .gain import l2_gain", "lipformer.functional.attention"),
        ("from ..functional import l2_gain", "lipformer.certificate.rules"),
        ("from lipformer import functional", "lipformer.layers.linear"),
        ("import lipformer as lf\nimport training", "recipes.cli"),
        ("import torch, math", "lipformer.functional.gain.minimum"),
    ],
)
def test_a_forward_import_is_allowed(source: str, module: str) -> None:
    assert not backward_imports(source, module, package=module.rpartition(".")[0])


@pytest.mark.parametrize("path", sources("lipformer", "training", "recipes"), ids=module_name)
def test_no_private_name_crosses_packages(path: Path) -> None:
    found = private_imports(path.read_text(), module_name(path), package_of(path))
    assert not found, "\n".join(found)


def test_a_private_import_is_found() -> None:
    module, package = "lipformer.layers.linear", "lipformer.layers"
    for source in (
        "from lipformer.functional import _gain",
        "from lipformer.functional.gain import _spread",
        "import lipformer.functional._gain",
        "def f():\n    from ..certificate.bounds import _finish",
    ):
        assert private_imports(source, module, package)
    assert not private_imports("from .spectral import _margin\nimport torch._C", module, package)


@pytest.mark.parametrize("path", LIBRARY, ids=module_name)
def test_the_library_imports_torch_and_einops_alone(path: Path) -> None:
    found = foreign_imports(path.read_text(), module_name(path))
    assert not found, "\n".join(found)


def test_a_foreign_import_is_found() -> None:
    lazy = "def f():\n    import zuko"
    assert foreign_imports("import scipy.special", "lipformer.functional.lambert")
    assert foreign_imports(lazy, "lipformer.layers.linear")
    assert foreign_imports("import zuko", "lipformer.flows.zuko")
    assert not foreign_imports(lazy, "lipformer.flows.zuko")


@pytest.mark.parametrize("path", LIBRARY, ids=module_name)
def test_weights_are_not_changed_behind_autograd(path: Path) -> None:
    found = data_and_version_uses(path.read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "w.data = x",
        "w.data += x",
        "m.w.data[0] = x",
        "w.data.mul_(2)",
        "a, w.data = x",
        "w._version",
    ],
)
def test_a_change_behind_autograd_is_found(source: str) -> None:
    assert data_and_version_uses(source)


def test_reading_data_and_writing_elsewhere_is_allowed() -> None:
    assert not data_and_version_uses("x = batch.data\nw.copy_(x)\nself.version = 1")


@pytest.mark.parametrize("path", sources("lipformer", "training", "recipes", "tests"), ids=module_name)
def test_a_file_is_at_most_600_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", PUBLIC_PACKAGES, ids=module_name)
def test_public_names_are_all(path: Path) -> None:
    if not bound_names(path):
        return  # a room: its modules are imported by name
    package = importlib.import_module(module_name(path))
    assert hasattr(package, "__all__"), f"{module_name(path)} has no __all__"
    listed = list(package.__all__)
    assert len(set(listed)) == len(listed), "a name is listed twice"
    missing = [name for name in listed if not hasattr(package, name)]
    assert not missing, f"listed in __all__ but not there: {missing}"
    private = [name for name in listed if name.startswith("_") and name != "__version__"]
    assert not private, f"private names in __all__: {private}"
    foreign = [name for name in listed if origin(package, name) in {"torch", "einops"}]
    assert not foreign, f"names of other packages in __all__: {foreign}"
    public = {n for n in bound_names(path) if not isinstance(getattr(package, n), ModuleType)}
    assert public <= set(listed), f"public but not in __all__: {sorted(public - set(listed))}"


def origin(package: ModuleType, name: str) -> str:
    value = getattr(package, name)
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return str(module or "").partition(".")[0]


IMPORT_PROBE = """
import json, os, random, sys, warnings
import torch

def state():
    tiny = torch.tensor(1e-310, dtype=torch.float64)
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "grad mode": torch.is_grad_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "denormals kept": (tiny * 0.5).item() > 0,
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch generator": torch.get_rng_state().tolist(),
        "python generator": str(random.getstate()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "attention backends": [
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ],
        "environment": dict(os.environ),
        "warning filters": str(warnings.filters),
    }

before, modules = state(), set(sys.modules)
import lipformer
print(json.dumps({
    "before": before,
    "after": state(),
    "torch's": sorted(modules),
    "ours": sorted(set(sys.modules) - modules),
}))
"""


@pytest.fixture(scope="module")
def fresh_import() -> dict[str, Any]:
    """torch's global state before and after `import lipformer`, and the modules that it loaded."""
    command = [sys.executable, "-c", IMPORT_PROBE]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_import_loads_torch_and_einops_alone(fresh_import: dict[str, Any]) -> None:
    loaded = {name.partition(".")[0] for name in fresh_import["ours"]}
    known = {name.partition(".")[0] for name in fresh_import["torch's"]}
    assert "lipformer" in loaded
    assert loaded - known - RUNTIME - sys.stdlib_module_names == set()


def test_import_is_quick(fresh_import: dict[str, Any]) -> None:
    # Modules, not seconds: a machine under load cannot make this fail.
    new = [name for name in fresh_import["ours"] if not name.startswith("lipformer")]
    assert len(new) <= MAX_NEW_MODULES, f"import lipformer loads {len(new)} more modules: {new}"


def test_import_has_no_side_effects(fresh_import: dict[str, Any]) -> None:
    assert fresh_import["after"] == fresh_import["before"]
