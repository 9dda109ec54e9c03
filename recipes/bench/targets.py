"""The speeds that the project promises, and whether a run kept them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recipes.bench.memory import Memory
from recipes.bench.timing import ENOUGH, Ratio, Samples


@dataclass(frozen=True)
class Target:
    """A limit of the time of one layer in times of another, at one length."""

    name: str
    over: str
    under: str
    length: int
    limit: float
    at_most: bool = True

    def kept(self, measured: float) -> bool:
        return measured <= self.limit if self.at_most else measured >= self.limit


# float32, batch x N = 4096 tokens, D = 512, H = 8, causal, forward and backward of the whole layer.
TOKENS, DIM, HEADS = 4096, 512, 8
LENGTHS = (256, 1024, 4096)
TARGETS = (
    Target("lean form / nn.MultiheadAttention", "lean", "mha", 256, 0.85),
    Target("lean form / nn.MultiheadAttention", "lean", "mha", 1024, 0.85),
    Target("lean form / nn.MultiheadAttention", "lean", "mha", 4096, 1.0),
    *(Target("paper form / nn.MultiheadAttention", "paper", "mha", n, 1.0) for n in LENGTHS),
    *(Target("cdist / lean form", "cdist", "lean", n, 4.0, at_most=False) for n in (1024, 4096)),
    *(Target("ALiBi / no ALiBi", "lean_alibi", "lean", n, 1.1) for n in LENGTHS),
    Target("spectral bounds / lean form", "bounds", "lean", 1024, 0.10),
)
MEMORY_LENGTH = 8192
MEMORY_LIMIT = 10**9


@dataclass(frozen=True)
class Verdict:
    """A target with what was measured.

    ``passed`` goes by the median. ``clear`` tells whether both quartiles agree with it, of at least
    three measurements on a quiet machine. Both are None where nothing was measured.
    """

    name: str
    length: int
    limit: float
    at_most: bool
    measured: Ratio | None
    passed: bool | None
    clear: bool | None


def judge(samples: Mapping[int, Samples]) -> list[Verdict]:
    """Compares a run, by length, with every target."""
    verdicts = []
    for target in TARGETS:
        ratio = samples.get(target.length, Samples()).ratio(target.over, target.under)
        passed = clear = None
        if ratio is not None:
            passed = target.kept(ratio.median)
            agreed = target.kept(ratio.low) == target.kept(ratio.high)
            clear = agreed and ratio.quiet and ratio.count >= ENOUGH
        verdicts.append(
            Verdict(target.name, target.length, target.limit, target.at_most, ratio, passed, clear)
        )
    return verdicts


def judge_memory(memory: Memory | None) -> Verdict:
    """The peak of the lean layer's process in GB, against its limit."""
    name, limit = "lean form, peak memory (GB)", MEMORY_LIMIT / 1e9
    if memory is None:
        return Verdict(name, MEMORY_LENGTH, limit, True, None, None, None)
    peak = memory.peak / 1e9
    return Verdict(
        name, MEMORY_LENGTH, limit, True, Ratio(peak, peak, peak, 1, True), peak <= limit, True
    )
