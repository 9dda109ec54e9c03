"""Lightning on the pretend GPU: its accelerator "pretend", which "gpu" and "auto" choose too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors import accelerator_connector

from tests.gpu import pretend


class PretendAccelerator(Accelerator):
    """One pretend GPU."""

    def setup_device(self, device: torch.device) -> None:
        """Raises ValueError unless the device is the pretend one."""
        if device.type != pretend.NAME:
            raise ValueError(f"device must be {pretend.NAME}, got {device}")

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """None."""
        return {}

    def teardown(self) -> None:
        """Nothing to do."""

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """1 and "1" alone are allowed (and -1, all)."""
        if int(devices) not in {1, -1}:
            raise ValueError(f"there is one {pretend.NAME} device, got devices={devices!r}")
        return 1

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """The device."""
        return [torch.device(pretend.NAME, 0)]

    @staticmethod
    def auto_device_count() -> int:
        """1."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Always."""
        return True

    @staticmethod
    def name() -> str:
        """As in Trainer(accelerator=...)."""
        return pretend.NAME


class _MixedPrecision(MixedPrecision):
    """Lightning asks for CUDA's autocast and scaler wherever the accelerator is not one it knows."""

    def __init__(self, precision: Any, device: str, scaler: Any = None) -> None:
        super().__init__(precision, pretend.NAME if device == "cuda" else device, scaler)


class _SingleDeviceStrategy(SingleDeviceStrategy):
    """Lightning chooses the CPU for them, too."""

    @property
    def root_device(self) -> torch.device:
        mine = isinstance(self.accelerator, PretendAccelerator)
        return torch.device(pretend.NAME, 0) if mine else self._root_device


@contextlib.contextmanager
def lightning() -> Iterator[None]:
    """The pretend GPU, with Lightning's trainers on it; `device` is entered too."""
    connector = accelerator_connector._AcceleratorConnector
    chosen = staticmethod(lambda: pretend.NAME)
    patches = [
        (accelerator_connector, "MixedPrecision", _MixedPrecision),
        (accelerator_connector, "SingleDeviceStrategy", _SingleDeviceStrategy),
        (connector, "_choose_gpu_accelerator_backend", chosen),
        (connector, "_choose_auto_accelerator", chosen),
    ]
    with pretend.device(), contextlib.ExitStack() as stack:
        AcceleratorRegistry.register(pretend.NAME, PretendAccelerator)
        stack.callback(AcceleratorRegistry.remove, pretend.NAME)
        for owner, name, replacement in patches:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield
