"""Energy that the machine's own counters tell: RAPL's of CPU packages and memory, and NVIDIA's driver's of
its GPUs.

Counters are of whole devices, whoever keeps them busy. Where there is none that may be read, the reason is
told instead.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

_POWERCAP: Final = Path("/sys/class/powercap")
_NVML: Final = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
_NAME_BYTES: Final = 96


class Counter(Protocol):
    """A counter that grows with energy used."""

    @property
    def name(self) -> str:
        """What it counts."""

    def joules(self) -> float:
        """Return its value."""

    def between(self, before: float, after: float) -> float:
        """Return the energy from one value to a later one, in joules."""


@dataclass(frozen=True, slots=True)
class RaplZone:
    """A zone under /sys/class/powercap. range_j: where its counter starts again at 0."""

    name: str
    path: Path
    range_j: float

    def joules(self) -> float:
        """Return its value. Raises OSError."""
        return int((self.path / "energy_uj").read_text(encoding="ascii")) / 1e6

    def between(self, before: float, after: float) -> float:
        """Return the difference, over at most one start anew."""
        return after - before + (self.range_j if after < before else 0.0)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of NVIDIA's. handle, library: of NVML."""

    name: str
    library: ctypes.CDLL
    handle: ctypes.c_void_p

    def joules(self) -> float:
        """Return its value since the driver was loaded. Raises OSError."""
        value = ctypes.c_ulonglong()
        code = self.library.nvmlDeviceGetTotalEnergyConsumption(self.handle, ctypes.byref(value))
        if code != 0:
            raise OSError(f"NVML answers {code}")
        return value.value / 1000

    def between(self, before: float, after: float) -> float:
        """Return the difference."""
        return after - before


class EnergyMeter:
    """Reads all counters together. sources: their names. absent: why there are none; None where there are."""

    def __init__(self, counters: tuple[Counter, ...], absent: str | None) -> None:
        self._counters = counters
        self.sources = tuple(counter.name for counter in counters)
        self.absent = absent

    def read(self) -> tuple[float, ...]:
        """Return the values of all counters."""
        return tuple(counter.joules() for counter in self._counters)

    def joules_since(self, reading: tuple[float, ...]) -> float | None:
        """Return the energy used since :meth:`read`, in joules; None without counters."""
        if not self._counters:
            return None
        pairs = zip(self._counters, reading, self.read(), strict=True)
        return sum(counter.between(before, after) for counter, before, after in pairs)


def find_energy(powercap: Path = _POWERCAP, nvml: str = _NVML) -> EnergyMeter:
    """Return a meter of every counter that this process may read."""
    zones, reason = _rapl(powercap)
    cards, why = _gpus(nvml)
    counters: tuple[Counter, ...] = (*zones, *cards)
    return EnergyMeter(counters, None if counters else f"{reason}; {why}")


def gpu_names(nvml: str = _NVML) -> tuple[str, ...]:
    """Return the names of NVIDIA's GPUs, as the driver has them."""
    return tuple(name for _, _, name in _devices(nvml))


def _rapl(powercap: Path) -> tuple[list[RaplZone], str]:
    """Return the packages and their memory, which a package's own counter does not hold, and why there are
    none.
    """
    zones: list[RaplZone] = []
    reason = f"no RAPL counters under {powercap}"
    for path in sorted(powercap.glob("intel-rapl:*")):
        try:
            name = (path / "name").read_text(encoding="ascii").strip()
            if not name.startswith("package") and name != "dram":
                continue
            limit = int((path / "max_energy_range_uj").read_text(encoding="ascii")) / 1e6
            zone = RaplZone(f"{path.name} {name}", path, limit)
            zone.joules()
        except OSError as error:
            reason = f"{path} cannot be read ({error.strerror})"
        else:
            zones.append(zone)
    return zones, reason


def _gpus(nvml: str) -> tuple[list[Gpu], str]:
    cards: list[Gpu] = []
    reason = f"no GPUs by {nvml}"
    for library, handle, name in _devices(nvml):
        card = Gpu(name, library, handle)
        try:
            card.joules()
        except OSError as error:
            reason = f"{name} does not count energy ({error})"
        else:
            cards.append(card)
    return cards, reason


def _devices(nvml: str) -> list[tuple[ctypes.CDLL, ctypes.c_void_p, str]]:
    try:
        library = ctypes.CDLL(nvml)
    except OSError:
        return []
    count = ctypes.c_uint()
    if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    found: list[tuple[ctypes.CDLL, ctypes.c_void_p, str]] = []
    for index in range(count.value):
        handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES)
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
            library.nvmlDeviceGetName(handle, name, _NAME_BYTES)
            found.append((library, handle, name.value.decode("utf-8", "replace")))
    return found
