"""recipes.bench.gpu on the pretend GPU, which counts for it; exits as it does.

python -m tests.gpu.bench --smoke --output DIRECTORY
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from recipes.bench import device, gpu
from tests.gpu import pretend


def counted(work: Callable[[], object]) -> device.Counts:
    """Host reads and kernels of the work."""
    with pretend.record() as log:
        work()
    return device.Counts(len(log.reads), sum(log.kernels.values()))


if __name__ == "__main__":
    device.COUNTERS[pretend.NAME] = counted
    with pretend.device():
        sys.exit(gpu.main(["--device", pretend.NAME, *sys.argv[1:]]))
