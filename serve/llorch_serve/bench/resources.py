"""What a process and its machine have: memory, CPUs, GPUs, and the distributions that decide how fast they
are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil

from llorch_serve.bench.energy import gpu_names
from llorch_serve.bench.schema import Host
from llorch_serve.doctor.machine import look_at_machine
from llorch_serve.providers import PROVIDERS
from llorch_serve.providers.runtime import DISTRIBUTIONS, version_of


def peak_rss_mib() -> float:
    """Return the most memory this process has held, in MiB."""
    if sys.platform == "win32":
        info: Any = psutil.Process().memory_info()  # its type depends on the system
        peak = float(info.peak_wset)
    elif sys.platform == "linux":
        # getrusage would count what the parent process held when it started this one.
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        peak = int(status.split("VmHWM:")[1].split()[0]) * 2**10
    else:
        import resource

        peak = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak / 2**20


def look_at_host() -> Host:
    """Return this machine, as far as it decides speed."""
    machine = look_at_machine()
    return Host(
        system=machine.system,
        cpu=machine.cpu,
        cpu_features=machine.cpu_features,
        cpus=machine.cpus,
        cpus_allowed=machine.cpus_allowed,
        memory_bytes=machine.memory_bytes,
        gpus=gpu_names(),
    )


def software() -> tuple[str, ...]:
    """Return the distributions of this interpreter that decide speed, each with its version."""
    names = dict.fromkeys(
        ("llorch", *DISTRIBUTIONS, *(row.wheel for row in PROVIDERS if row.plugin is not None))
    )
    found = [f"{name} {version}" for name in names if (version := version_of(name)) is not None]
    return (*found, f"Python {'.'.join(map(str, sys.version_info[:3]))}")
