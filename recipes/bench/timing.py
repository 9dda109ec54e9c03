"""Timing of several layers against each other on a noisy machine.

Load comes and goes over seconds, so two layers timed one after the other cannot be compared. Here
each repetition runs every layer once, in a new order, and layers are compared within a repetition: the
result is the median of those ratios, with their quartiles as the measure of what noise is left.
Measurements during which other processes were at work are left out where enough others remain: load
hurts layers of many small operations most, since their threads wait for each other more often.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from recipes.bench.load import Moment, quiet_between

# A layer that takes many times longer than the others runs in every second repetition only, so
# that it does not use up the time of all.
_MAX_STRIDE = 2
_MAX_REPETITIONS = 200
# So many undisturbed measurements are preferred to all of them.
ENOUGH = 3


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of the ratios within a repetition, and how many there were.

    ``quiet`` tells whether they were all measured while the machine did nothing else.
    """

    median: float
    low: float
    high: float
    count: int
    quiet: bool


@dataclass(frozen=True)
class Samples:
    """Seconds by layer and repetition, and which of them others disturbed."""

    seconds: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    disturbed: Mapping[str, AbstractSet[int]] = field(default_factory=dict)

    def _quiet(self, repetitions: AbstractSet[int], *names: str) -> tuple[AbstractSet[int], bool]:
        """The undisturbed repetitions and True, or all of them and False if those are too few."""
        quiet = set(repetitions).difference(*(self.disturbed.get(name, ()) for name in names))
        enough = len(quiet) >= ENOUGH or quiet == repetitions
        return (quiet, True) if enough else (repetitions, False)

    def median(self, name: str) -> float:
        times = self.seconds[name]
        return statistics.median(times[i] for i in self._quiet(set(times), name)[0])

    def best(self, name: str) -> float:
        return min(self.seconds[name].values())

    def quiet_share(self) -> float:
        """Share of the measurements that nobody disturbed."""
        total = sum(map(len, self.seconds.values()))
        return 1.0 - sum(map(len, self.disturbed.values())) / total if total else 1.0

    def ratio(self, over: str, under: str) -> Ratio | None:
        """Time of ``over`` in times of ``under``; None where one of them was not measured."""
        top, bottom = self.seconds.get(over, {}), self.seconds.get(under, {})
        repetitions, quiet = self._quiet(top.keys() & bottom.keys(), over, under)
        ratios = [top[i] / bottom[i] for i in repetitions]
        if not ratios:
            return None
        if len(ratios) == 1:
            return Ratio(ratios[0], ratios[0], ratios[0], 1, quiet)
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return Ratio(median, low, high, len(ratios), quiet)


def training_step(layer: nn.Module, x: Tensor) -> Callable[[Callable[[], float]], float]:
    """The forward and backward pass of a layer, to the input's and all parameters' gradients.

    Args:
        layer: maps x to one tensor.
        x: the input; a copy of it that requires a gradient is used.

    Returns:
        A function that runs the step once and returns what it took by the clock it is given.
        Gradients are dropped after the clock has stopped. The first run draws the output's gradient
        and so takes a little longer.
    """
    x = x.detach().clone().requires_grad_()
    grads: list[Tensor] = []

    def step(clock: Callable[[], float]) -> float:
        start = clock()
        out = layer(x)
        if not grads:
            grads.append(torch.randn_like(out))
        out.backward(grads[0])
        taken = clock() - start
        layer.zero_grad(set_to_none=True)
        x.grad = None
        return taken

    return step


def _strides(seconds: Mapping[str, float]) -> dict[str, int]:
    """In which repetitions a layer runs: every one or every second."""
    usual = statistics.median(seconds.values())
    return {name: min(_MAX_STRIDE, max(1, round(t / (2 * usual)))) for name, t in seconds.items()}


def interleave(
    steps: Mapping[str, Callable[[Callable[[], float]], float]],
    *,
    seconds: float,
    min_repetitions: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Runs the steps in turn until the time is used up.

    Args:
        steps: what :func:`training_step` returns, by name.
        seconds: how long to go on, warm-up included.
        min_repetitions: at least this many, whatever the time.
        clock: wall-clock time, or ``time.process_time`` (sensible with one thread).
    """
    deadline = time.perf_counter() + seconds
    for step in steps.values():
        step(clock)
    found: dict[str, dict[int, float]] = {name: {} for name in steps}
    disturbed: dict[str, set[int]] = {name: set() for name in steps}
    stride = dict.fromkeys(steps, 1)
    order = list(steps)
    shuffle = random.Random(0).shuffle
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for repetition in range(_MAX_REPETITIONS):
            if repetition >= min_repetitions and time.perf_counter() > deadline:
                break
            shuffle(order)
            for name in order:
                if repetition % stride[name]:
                    continue
                start = Moment.now()
                found[name][repetition] = steps[name](clock)
                if not quiet_between(start, Moment.now()):
                    disturbed[name].add(repetition)
            if repetition == 0:
                stride = _strides({name: times[0] for name, times in found.items()})
    finally:
        if collecting:
            gc.enable()
    return Samples(found, disturbed)
