"""The host's memory in the place of a device's, where copies go by address."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy.typing as npt


class PlayedMemory:
    """What :class:`llorch_serve.providers.device_memory.DeviceMemory` asks for. free: bytes that it says are
    free.
    """

    def __init__(self, free: int = 2**30) -> None:
        self.free = free
        self.waiting = 0  # copies that nobody has waited for
        self.bytes_read = 0  # that came to the host
        self.reads = 0  # in so many copies

    def free_bytes(self) -> int:
        return self.free

    def copy(self, target: int, source: int, *, rows: int, width: int, pitch: int) -> None:
        self.waiting += 1
        for row in range(rows):
            ctypes.memmove(target + row * pitch, source + row * pitch, width)

    def wait(self) -> None:
        self.waiting = 0

    def read(self, target: npt.NDArray[Any], source: int) -> None:
        self.bytes_read += target.nbytes
        self.reads += 1
        ctypes.memmove(target.ctypes.data, source, target.nbytes)
