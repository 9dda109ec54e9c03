"""Commands of the recipes in small."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import torch

# Two updates, in silence.
TRAINER: dict[str, object] = {
    "trainer.max_steps": 2,
    "trainer.log_every_n_steps": 1,
    "trainer.val_check_interval": 2,
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": False,
    "trainer.enable_model_summary": False,
}


def run_small(
    main: Callable[[list[str]], int],
    sizes: Mapping[str, object],
    command: str,
    folder: Path,
    *arguments: str,
) -> int:
    """Runs a subcommand at some sizes, with its output in a folder; later arguments win."""
    small = [f"--{name}={value}" for name, value in sizes.items()]
    configs = [part for part in arguments if part.startswith("--config")]
    others = [part for part in arguments if part not in configs]
    # A command flushes denormals and sets filters of its own.
    with mock.patch.object(torch, "set_flush_denormal"), warnings.catch_warnings():
        return main([command, f"--out={folder}", *configs, *small, *others])
