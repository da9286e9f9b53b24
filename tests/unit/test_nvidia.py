"""NVIDIA's GPUs, as a library that plays NVML tells of them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

from llorch_serve.doctor.machine import look_at_machine
from llorch_serve.providers.nvidia import Gpu, list_gpus, load_nvml, memory_of_process

GIB = 2**30


class Nvml:
    """Two GPUs, of which the second's memory is not known. fails: functions that return an error."""

    def __init__(self, *fails: str) -> None:
        self.fails = fails
        self.calls: list[str] = []
        self.used = {0: {7: 3 * GIB, 8: GIB}, 1: {7: 2 * GIB}}

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return 999 if name in self.fails else self._answer(name, *arguments)

        return call

    def _answer(self, name: str, *arguments: Any) -> int:
        match name, arguments:
            case "nvmlDeviceGetCount_v2", (count,):
                count._obj.value = 2
            case "nvmlDeviceGetHandleByIndex_v2", (index, device):
                device._obj.value = index.value + 1
            case "nvmlSystemGetDriverVersion", (text, _):
                text.value = b"570.86.10"
            case "nvmlDeviceGetName", (device, text, _):
                text.value = b"NVIDIA H200" if device.value == 1 else b"NVIDIA GB10"
            case "nvmlDeviceGetMemoryInfo", (device, memory):
                if device.value == 2:
                    return 3  # not supported
                memory._obj.total, memory._obj.free = 140 * GIB, 139 * GIB
            case "nvmlDeviceGetComputeRunningProcesses_v3", (device, count, found):
                used = self.used[device.value - 1]
                count._obj.value = len(used)
                for place, (pid, size) in enumerate(used.items()):
                    found[place].pid, found[place].used = pid, size
            case (("nvmlInit_v2" | "nvmlShutdown"), ()):
                pass
            case _:
                raise AssertionError(name)
        return 0


def test_gpus_have_names_memory_and_a_driver() -> None:
    nvml = Nvml()
    assert list_gpus(nvml) == (
        Gpu(0, "NVIDIA H200", "570.86.10", 140 * GIB, 139 * GIB),
        Gpu(1, "NVIDIA GB10", "570.86.10", None, None),
    )
    assert (nvml.calls[0], nvml.calls[-1]) == ("nvmlInit_v2", "nvmlShutdown")


def test_what_the_driver_does_not_tell_is_left_out() -> None:
    assert list_gpus(None) == ()
    dead = Nvml("nvmlInit_v2")
    assert list_gpus(dead) == ()
    assert dead.calls == ["nvmlInit_v2"]
    assert list_gpus(Nvml("nvmlDeviceGetCount_v2")) == ()
    assert list_gpus(Nvml("nvmlDeviceGetHandleByIndex_v2")) == ()
    assert list_gpus(Nvml("nvmlSystemGetDriverVersion", "nvmlDeviceGetName"))[0] == Gpu(
        0, "unknown", "unknown", 140 * GIB, 139 * GIB
    )


def test_memory_of_a_process_is_that_of_all_gpus() -> None:
    assert memory_of_process(Nvml(), 7) == 5 * GIB
    assert memory_of_process(Nvml(), 8) == GIB
    assert memory_of_process(Nvml(), 9) is None
    assert memory_of_process(None, 7) is None
    assert memory_of_process(Nvml("nvmlDeviceGetComputeRunningProcesses_v3"), 7) is None
    nvml = Nvml()
    nvml.used[1][7] = 2**64 - 1  # the driver knows of the process and may not tell
    assert memory_of_process(nvml, 7) is None


def test_the_structures_are_those_of_the_driver() -> None:
    from llorch_serve.providers import nvidia

    # nvmlMemory_t is three 64-bit numbers; nvmlProcessInfo_t of v3 is aligned to 8 bytes.
    assert ctypes.sizeof(nvidia._Memory) == 24
    assert ctypes.sizeof(nvidia._Process) == 24


def test_this_machine_has_what_its_driver_says() -> None:
    names = [gpu.name for gpu in list_gpus(load_nvml())]
    assert [gpu.name for gpu in look_at_machine().gpus] == names
    assert memory_of_process(load_nvml(), os.getpid()) is None  # nothing here runs on a GPU
