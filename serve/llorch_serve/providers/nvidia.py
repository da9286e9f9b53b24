"""NVIDIA's GPUs as their driver tells of them: names, memory, and what a process holds of it.

The driver brings a library for that, NVML, which is here wherever a GPU can be used, whatever wheel of
onnxruntime is installed. Its functions and structures are those of NVIDIA's NVML API. Nothing is asked of the
GPUs themselves, and nothing is changed.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

_NAME_BYTES: Final = 96
_NOT_KNOWN: Final = 2**64 - 1  # what NVML says where the driver may not tell
_MOST_PROCESSES: Final = 256


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. index: among all of the machine. driver: its version.

    memory_bytes, memory_free_bytes: in all, and free; None where the memory is the host's, or divided.
    """

    index: int
    name: str
    driver: str
    memory_bytes: int | None
    memory_free_bytes: int | None


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def load_nvml() -> Any:
    """Return NVML, or None where there is no driver of NVIDIA's."""
    try:
        return ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return None


def list_gpus(library: Any) -> tuple[Gpu, ...]:
    """Return the machine's GPUs; none where the driver does not answer. library: see :func:`load_nvml`."""
    with _running(library) as answers:
        if not answers:
            return ()
        driver = _text(library.nvmlSystemGetDriverVersion)
        return tuple(_gpu(library, index, device, driver) for index, device in _devices(library))


def memory_of_process(library: Any, pid: int) -> int | None:
    """Return the bytes that a process holds on all GPUs together; None where the driver does not say.

    In a container whose processes have other numbers than the host's it does not.
    """
    held: list[int] = []
    with _running(library) as answers:
        if answers:
            for _, device in _devices(library):
                held += [process.used for process in _processes(library, device) if process.pid == pid]
    return sum(held) if held and _NOT_KNOWN not in held else None


@contextmanager
def _running(library: Any) -> Iterator[bool]:
    """Begin with NVML, and end it afterwards; give whether it answers."""
    answers = library is not None and library.nvmlInit_v2() == 0
    try:
        yield answers
    finally:
        if answers:
            library.nvmlShutdown()


def _devices(library: Any) -> Iterator[tuple[int, ctypes.c_void_p]]:
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return
    for index in range(count.value):
        device = ctypes.c_void_p()
        if not library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
            yield index, device


def _gpu(library: Any, index: int, device: ctypes.c_void_p, driver: str) -> Gpu:
    memory = _Memory()
    known = library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
    total, free = (memory.total, memory.free) if known else (None, None)
    return Gpu(index, _text(library.nvmlDeviceGetName, device), driver, total, free)


def _processes(library: Any, device: ctypes.c_void_p) -> list[_Process]:
    found = (_Process * _MOST_PROCESSES)()
    count = ctypes.c_uint(_MOST_PROCESSES)
    if library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), found):
        return []
    return list(found[: count.value])


def _text(function: Any, *arguments: Any) -> str:
    """Return the text that a function writes; ``unknown`` where it fails."""
    text = ctypes.create_string_buffer(_NAME_BYTES)
    failed = function(*arguments, text, ctypes.c_uint(_NAME_BYTES))
    return "unknown" if failed else text.value.decode(errors="replace")
