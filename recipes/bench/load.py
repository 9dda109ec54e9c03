"""How much of the machine's processors others used while something was timed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
# Fields of the line "cpu": user, nice, system, irq, softirq, and steal (other virtual machines).
_BUSY = (1, 2, 3, 6, 7, 8)
_SHARE = 0.1


@dataclass(frozen=True)
class Moment:
    """Seconds on the clock, of all processors at work (None where unknown) and of this process."""

    wall: float
    busy: float | None
    own: float

    @classmethod
    def now(cls) -> Moment:
        busy = None
        if _STAT.exists():
            with _STAT.open() as file:
                fields = file.readline().split()
            busy = sum(int(fields[i]) for i in _BUSY) / os.sysconf("SC_CLK_TCK")
        return cls(time.perf_counter(), busy, time.process_time())


def quiet_between(start: Moment, end: Moment) -> bool:
    """Whether others took at most a tenth of the processors; True where that cannot be known.

    The system counts in ticks, 10 ms as a rule, so one of them is granted on top.
    """
    if start.busy is None or end.busy is None:
        return True
    others = (end.busy - start.busy) - (end.own - start.own)
    capacity = (end.wall - start.wall) * (os.cpu_count() or 1)
    return others <= _SHARE * capacity + 1.0 / os.sysconf("SC_CLK_TCK")
