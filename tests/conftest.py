"""What every test shares: threads, seed and torch's global settings.

Doctests in lipformer/ lie outside this directory and see none of the fixtures: an example that
draws numbers shows its own seed, as its reader will need it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# The cores are shared out among the xdist workers; more threads than cores only makes them wait.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_THREADS = max(1, (os.cpu_count() or 1) // _WORKERS)
torch.set_num_threads(_THREADS)
os.environ["OMP_NUM_THREADS"] = str(_THREADS)  # for the processes that tests start


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> Iterator[None]:
    """Seeds torch, and undoes what a test did to its default dtype and grad mode."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
