"""What a replica's process holds of memory, as it tells its fronts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import psutil

from llorch_serve.providers.nvidia import load_nvml, memory_of_process

INTERVAL_S: Final = 30.0
"""Between two questions to the driver, which takes milliseconds to answer; the model's memory stays."""


class ProcessMemory:
    """Memory of this process. now: a clock that does not go back, in seconds."""

    def __init__(self, now: Callable[[], float], nvml: Any = None) -> None:
        self._now = now
        self._nvml = load_nvml() if nvml is None else nvml
        self._on_device: int | None = None
        self._asked_s = float("-inf")

    def resident_bytes(self) -> int:
        """Return the resident memory, of the host."""
        return int(psutil.Process().memory_info().rss)

    def device_bytes(self) -> int | None:
        """Return what it holds of NVIDIA's GPUs, as of the last half minute; None: not known."""
        if self._now() - self._asked_s >= INTERVAL_S:
            self._asked_s = self._now()
            self._on_device = memory_of_process(self._nvml, os.getpid())
        return self._on_device
