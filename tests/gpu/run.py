"""Runs a module's command line on the pretend GPU, and exits as it does.

    python -m tests.gpu.run training fit --config recipes/quickstart.yaml --trainer.max_steps 2

Lightning's accelerators "pretend", "gpu" and "auto" are the pretend GPU. Several command lines in one
process: ``with lightning(): main([...])``, with `tests.gpu.accelerator.lightning`.
"""

from __future__ import annotations

import runpy
import sys

from tests.gpu.accelerator import lightning

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.argv = sys.argv[1:]
    with lightning():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
