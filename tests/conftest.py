"""What every test shares: threads, seed and torch's global settings.

Doctests in lipformer/ lie outside this directory and see none of the fixtures: an example that
draws numbers shows its own seed, as its reader will need it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# The tensors are tiny: on busy cores a second thread costs ten times what it brings.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # of what Lightning calls
os.environ["HF_HUB_OFFLINE"] = (
    "1"  # no test needs the hub; where there is no network it is tried for long
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """--device: what tests/gpu runs on."""
    parser.addoption("--device", choices=("pretend", "cuda"), default="pretend", help="of tests/gpu")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """What tests/gpu runs on."""
    return request.config.getoption("--device")


@pytest.fixture
def float64() -> None:
    """Tensors are float64 unless a test says otherwise."""
    torch.set_default_dtype(torch.float64)


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> Iterator[None]:
    """Seeds torch, and undoes what a test did to its default dtype and grad mode."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
