"""What this machine is, for people who compare figures: in words, and as a kind that has figures of its own.

Hypervisors hide a CPU's model, so a kind is who made it and the instructions it multiplies 8-bit numbers by.
"""

from __future__ import annotations

import platform
import re
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
    "avx512_fp16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
)
"""Instruction sets that decide how fast 8-bit products are."""

_AMX: Final = "amx_int8"
_KINDS: Final = {
    _AMX: "AMX",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx2": "AVX2",
    "i8mm": "I8MM",
    "asimddp": "dot products",
}
"""What a kind is named by, the fastest first."""

_VENDORS: Final = {
    "AuthenticAMD": "AMD",
    "GenuineIntel": "Intel",
    "0x41": "Arm",
    "0x61": "Apple",
    "0xc0": "Ampere",
}
"""By ``vendor_id`` of x86, and ``CPU implementer`` of Arm."""


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
        vendor=vendor_of(fields),
        virtual="hypervisor" in flags if "flags" in fields else None,
    )


def vendor_of(fields: dict[str, str]) -> str:
    """Return who made a CPU, by its fields of /proc/cpuinfo: a name that is known, or as it stands."""
    found = fields.get("vendor_id") or fields.get("CPU implementer") or ""
    return _VENDORS.get(found, found)


def kind_of(machine: Machine) -> str:
    """Return the kind of a machine, in words: ``Intel with AMX``."""
    fastest = next((name for name in _KINDS if name in machine.instructions), None)
    vendor = machine.vendor or machine.cpu
    if fastest is None:
        return vendor
    # Of all kinds, those with AMX and those that lack it differ most.
    lacks = ", without AMX" if "avx2" in machine.instructions and fastest != _AMX else ""
    return f"{vendor} with {_KINDS[fastest]}{lacks}"


def slug_of(name: str) -> str:
    """Return the name of a kind or an engine as a part of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def describe(machine: Machine) -> str:
    """Return CPU, cores and instruction sets in words."""
    guest = " in a virtual machine" if machine.virtual else ""
    with_ = f" with {', '.join(machine.instructions)}" if machine.instructions else ""
    return f"{machine.cpu}, {machine.cores} cores{guest}{with_}"


def cpu_fields(text: str) -> dict[str, str]:
    """Return the first processor's fields of /proc/cpuinfo's text."""
    fields = {}
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return fields
