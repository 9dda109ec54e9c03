"""The device that cases run on."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """ "pretend", or "cuda" for a real GPU."""
    return request.config.getoption("--device")
