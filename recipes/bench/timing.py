"""Timing of several layers against each other on a noisy machine, by torch.utils.benchmark.

Load comes and goes over seconds, so two layers timed one after the other cannot be compared. Here
each repetition times every layer, in a new order, and layers are compared within a repetition: the
result is the median of those ratios, with their quartiles as the measure of what noise is left.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import benchmark

Step = Callable[[], object]
# Seconds of a measurement, at least; what is quicker runs several times.
_LEAST = 0.01


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of the ratios within a repetition, and how many there were."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Samples:
    """Seconds by layer, one for each repetition."""

    seconds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, over: str, under: str) -> Ratio | None:
        """Time of ``over`` in times of ``under``; None where one of them was not measured."""
        if not {over, under} <= self.seconds.keys():
            return None
        ratios = [a / b for a, b in zip(self.seconds[over], self.seconds[under], strict=True)]
        quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
        low, median, high = torch.tensor(ratios, dtype=torch.float64).quantile(quartiles).tolist()
        return Ratio(median, low, high, len(ratios))


def training_step(layer: nn.Module, x: Tensor) -> Step:
    """The forward and backward pass of a layer, to the gradients of the input and what is trained.

    Args:
        layer: maps x to one tensor.
        x: the input; a copy of it that requires a gradient is used.
    """
    x = x.detach().clone().requires_grad_()
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    grads: list[Tensor] = []

    def step() -> tuple[Tensor, ...]:
        out = layer(x)
        if not grads:
            grads.append(torch.randn_like(out))
        return torch.autograd.grad(out, wanted, grads, allow_unused=True)

    return step


def interleave(
    steps: Mapping[str, Step],
    *,
    seconds: float,
    min_repetitions: int,
    timer: Callable[[], float] = benchmark.timer,
) -> Samples:
    """Times the steps in turn until the time is used up; each runs once more before it is timed.

    Args:
        steps: by name.
        seconds: how long to go on.
        min_repetitions: at least this many, whatever the time.
        timer: torch's, which waits for a device, or ``time.process_time`` (sensible with one thread).
    """
    threads = torch.get_num_threads()
    timers = {
        name: benchmark.Timer("step()", timer=timer, globals={"step": step}, num_threads=threads)
        for name, step in steps.items()
    }
    found: dict[str, list[float]] = {name: [] for name in steps}
    order, shuffle = list(steps), random.Random(0).shuffle
    deadline, repetition = time.perf_counter() + seconds, 0
    while order and (repetition < min_repetitions or time.perf_counter() < deadline):
        shuffle(order)
        for name in order:
            found[name].append(timers[name].blocked_autorange(min_run_time=_LEAST).median)
        repetition += 1
    return Samples(found)


def environment(*packages: str) -> dict[str, Any]:
    """What the figures depend on besides the code, with the versions of some packages (or None)."""
    installed = {found.name: found.version for found in metadata.distributions()}
    return {
        "python": platform.python_version(),
        **{name: installed.get(name) for name in ("torch", "lipformer", *packages)},
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": [round(v, 2) for v in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }
