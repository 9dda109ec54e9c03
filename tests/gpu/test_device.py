"""The device catches faults, casts as CUDA does, and every public name is run on it."""

from __future__ import annotations

import ast
import inspect
import re
import types
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import lipformer as lf
from lipformer import analysis, certificate, flows, functional, layers, models
from tests.gpu.case import options
from tests.gpu.cases_device import DEVICE, ERRORS, FAULTS
from tests.gpu.cases_flows import FLOWS
from tests.gpu.cases_layers import LAYERS
from tests.gpu.cases_models import MODELS
from tests.gpu.log import ROOT
from tests.gpu.results import results

PACKAGES = (layers, flows, models, certificate, functional, analysis, lf)
# Functions that hold no tensor, register a rule, or need another library.
ELSEWHERE = {
    "conv_bound", "debug_checks", "lambert_w0", "load_converted", "register_bake", "register_bound",
    "register_l2_attention", "register_own_token", "register_perturbation", "register_step",
    "register_token_wise", "row_spread", "supports_causal", "times", "to_freia", "to_nflows",
    "to_normflows", "to_pyro", "to_zuko", "weighted_sum",
}  # fmt: skip


def public(kind: Any) -> dict[str, Any]:
    """Public names of the package that are of a kind."""
    found = {name: getattr(package, name) for package in PACKAGES for name in package.__all__}
    return {name: value for name, value in found.items() if kind(value)}


def case(call: Any) -> str:
    return next(name for name, case in DEVICE.items() if case.call is call)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_wait_of_the_host_is_caught(fault: Any, device: str) -> None:
    """With the kind of wait and the line."""
    found = results("device", device)[case(fault)]
    if device == "cuda":
        assert "synchroniz" in found["error"]
        return
    assert found["error"] is None
    assert any(f"{FAULTS[fault]} in" in read and "cases_device.py:" in read for read in found["reads"])


@pytest.mark.parametrize("fault", ERRORS, ids=lambda fault: fault.__name__)
def test_a_mixing_is_caught(fault: Any, device: str) -> None:
    assert re.search(ERRORS[fault], results("device", device)[case(fault)]["error"])


SOUND = [name for name, case in DEVICE.items() if case.call not in (*FAULTS, *ERRORS)]


@pytest.mark.parametrize("name", SOUND, ids=str)
def test_the_device_is_sound(name: str, device: str) -> None:
    found = results("device", device)[name]
    assert found["error"] is None
    assert found["reads"] == []


def test_code_asks_for_the_type_of_a_device() -> None:
    """And not for CUDA: else the branches of GPUs would not be taken on the pretend one."""
    parts = [ROOT / name for name in ("lipformer", "training", "recipes")]
    files = [path for part in parts for path in part.rglob("*.py")]
    assert [str(path) for path in files if re.search(r"\.is_cuda\b", path.read_text())] == []


def test_every_layer_has_cases_with_every_option() -> None:
    """A layer or an option that is added needs a case."""
    every = [*LAYERS.values(), *FLOWS.values(), *MODELS.values()]
    given = set().union(*(options(case.spec) for case in every))
    modules = public(lambda value: inspect.isclass(value) and issubclass(value, nn.Module))
    del modules["Layer"]  # the base of all
    assert len(modules) > 15
    missing = [
        f"{name}({argument})"
        for name, module in modules.items()
        for argument in ["", *inspect.signature(module).parameters]
        if argument not in ("device", "dtype", "args", "kwargs") and (name, argument) not in given
    ]
    assert missing == []


def test_every_function_is_run() -> None:
    """Called as ``package.name(...)``, or given to a Case or to `new`, which call it."""
    run = []
    for path in Path(__file__).parent.glob("cases_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                run += [node.func, *node.args[: ast.unparse(node.func) in ("Case", "new")]]
    packages = {"lf", "analysis", "flows", "functional"}
    paths = [ast.unparse(part).split(".") for part in run if isinstance(part, ast.Attribute)]
    called = {path[-1] for path in paths if path[0] in packages}
    functions = public(lambda value: isinstance(value, types.FunctionType))
    variants = set(lf.models.VARIANTS)  # built by name
    assert functions.keys() - called - variants == ELSEWHERE
