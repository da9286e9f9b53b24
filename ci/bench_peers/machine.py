"""What this machine is, for people who compare figures."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

import psutil

from bench_peers.results import Machine
from llorch_serve.providers import usable_cpus

_TELLING: Final = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
)
"""Instruction sets that decide how fast 8-bit products are."""


def this_machine() -> Machine:
    """Describe this machine; processors are from /proc/cpuinfo where there is one."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    fields = cpu_fields(text)
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return Machine(
        cpu=fields.get("model name") or platform.processor() or platform.machine(),
        cores=usable_cpus(),
        instructions=[name for name in _TELLING if name in flags],
        memory_gib=psutil.virtual_memory().total / 2**30,
        system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        load=psutil.getloadavg()[0],
    )


def cpu_fields(text: str) -> dict[str, str]:
    """Return the first processor's fields of /proc/cpuinfo's text."""
    fields = {}
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return fields
