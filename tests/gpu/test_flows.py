"""Invertible blocks and flows, on a GPU."""

from __future__ import annotations

import pytest

from tests.gpu.cases_flows import FLOWS
from tests.gpu.results import results


@pytest.mark.parametrize("name", FLOWS, ids=str)
def test_on_the_device(name: str, device: str) -> None:
    """As on the CPU, with gradients; and the host never waits in training."""
    found = results("flows", device)[name]
    assert found["error"] is None
    assert found["reads"] == []
