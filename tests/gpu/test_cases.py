"""Layers, flows, models and functions with every option, on a GPU."""

from __future__ import annotations

import pytest

from tests.gpu.cases_analysis import ANALYSIS
from tests.gpu.cases_flows import FLOWS
from tests.gpu.cases_layers import LAYERS
from tests.gpu.cases_models import MODELS
from tests.gpu.results import results

GROUPS = {"layers": LAYERS, "flows": FLOWS, "models": MODELS, "analysis": ANALYSIS}
EVERY = [(group, name) for group in GROUPS for name in GROUPS[group]]


@pytest.mark.parametrize(("group", "name"), EVERY, ids=str)
def test_on_the_device(group: str, name: str, device: str) -> None:
    """As on the CPU, with gradients; and the host never waits in training."""
    found = results(group, device)[name]
    assert found["error"] is None
    assert found["reads"] == []
