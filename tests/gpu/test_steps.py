"""Kernels and float16 of whole training steps, on the pretend GPU."""

from __future__ import annotations

import functools

import pytest

from tests.gpu.results import lines

# At most so many kernels in forward and backward of 5 layers, D = 512.
BUDGET = {
    "dot_product": 205,
    "l2": 380,
    "l2_tied": 635,
    "contractive": 924,
    "contractive_kim2021": 1233,
    "invertible": 1275,
    "lipschitz": 1281,
}


@functools.cache
def steps() -> dict[str, dict[str, int]]:
    """One training step of each variant."""
    return {line["variant"]: line for line in lines("tests.gpu.steps", "--json")}


@pytest.fixture(autouse=True)
def _counted(device: str) -> None:
    if device != "pretend":
        pytest.skip("kernels are counted on the pretend GPU")


def test_every_variant_has_a_budget() -> None:
    assert set(steps()) == set(BUDGET)


@pytest.mark.parametrize("variant", BUDGET)
def test_kernels_of_a_step(variant: str) -> None:
    assert steps()[variant]["kernels"] <= BUDGET[variant]


@pytest.mark.parametrize("variant", BUDGET)
def test_the_host_never_waits_in_a_step(variant: str) -> None:
    assert steps()[variant]["reads"] == 0


@pytest.mark.parametrize("variant", BUDGET)
def test_float16_skips_no_more_steps_than_dot_product(variant: str) -> None:
    """Gradients must fit float16 at the loss scale that dot-product attention trains at."""
    assert steps()[variant]["skipped"] <= steps()["dot_product"]["skipped"]
