"""What this machine has: its CPU and memory as far as this process may use them, and NVIDIA's GPUs."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from llorch_serve.providers import usable_cpus
from llorch_serve.providers.nvidia import Gpu, list_gpus, load_nvml

_CPU_INFO: Final = Path("/proc/cpuinfo")
_FEATURES: Final = (
    "avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "f16c", "asimd", "asimddp", "i8mm", "sve",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine. cpu_features: those that kernels choose by, where the system lists them.

    cpus, cpus_allowed: of the machine, and of this process. memory: bytes in all, and free.
    gpus: NVIDIA's, all of the machine; other makers' are not looked for.
    """

    system: str
    python: str
    cpu: str
    cpu_features: tuple[str, ...]
    cpus: int
    cpus_allowed: int
    memory_bytes: int
    memory_free_bytes: int
    gpus: tuple[Gpu, ...]


def look_at_machine(cpu_info: Path = _CPU_INFO) -> Machine:
    """Return what the system says. cpu_info: what Linux says of the CPUs."""
    fields: dict[str, str] = {}
    if cpu_info.is_file():
        for line in cpu_info.read_text(encoding="ascii", errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    memory = psutil.virtual_memory()
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cpu=fields.get("model name") or platform.processor() or platform.machine(),
        cpu_features=tuple(name for name in _FEATURES if name in flags),
        cpus=os.cpu_count() or 1,
        cpus_allowed=usable_cpus(),
        memory_bytes=memory.total,
        memory_free_bytes=memory.available,
        gpus=list_gpus(load_nvml()),
    )
