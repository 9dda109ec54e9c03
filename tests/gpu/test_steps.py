"""Kernels and float16 of whole training steps, and kernels of samples, on the pretend GPU."""

from __future__ import annotations

import functools

import pytest

from tests.gpu.results import lines

# At most so many kernels in forward and backward of 5 layers, D = 512, in bf16-mixed as the recipes.
BUDGET = {
    "dot_product": 517,
    "l2_untied": 552,
    "l2": 847,
    "contractive": 1118,
    "contractive_kim2021": 1430,
    "invertible": 1533,
    "lipschitz": 1612,
}
# At most so many kernels in Flow.sample of each flow, fresh. A branch of attention has 34 (causal 55),
# a feed-forward one 7; where the device decides when to stop it is 5803, 13838 and 21410.
SAMPLES = {"small": 1680, "sets": 2930, "sequences": 3890}


@functools.cache
def counted() -> dict[str, dict[str, int]]:
    """One training step of each variant, and samples of each flow."""
    return {line.get("variant") or line["flow"]: line for line in lines("tests.gpu.steps")}


def steps() -> dict[str, dict[str, int]]:
    """One training step of each variant."""
    return {name: line for name, line in counted().items() if "variant" in line}


@pytest.fixture(autouse=True)
def _counted(device: str) -> None:
    if device != "pretend":
        pytest.skip("kernels are counted on the pretend GPU")


def test_every_variant_has_a_budget() -> None:
    assert set(steps()) == set(BUDGET)


@pytest.mark.parametrize("variant", BUDGET)
def test_a_step(variant: str) -> None:
    """Gradients must fit float16 at the loss scale that dot-product attention trains at."""
    step, plain = steps()[variant], steps()["dot_product"]
    assert step["kernels"] <= BUDGET[variant]
    assert step["kernels"] <= 3.2 * plain["kernels"]
    assert step["reads"] == 0
    assert step["skipped"] <= plain["skipped"]


@pytest.mark.parametrize("flow", SAMPLES)
def test_a_sample(flow: str) -> None:
    """The host reads the residuals of each evaluation once, and little beside."""
    sample = counted()[flow]
    assert sample["kernels"] <= SAMPLES[flow]
    assert sample["reads"] <= 3.2 * sample["evaluations"]
