"""Energy counters: which are found, what they give over their own limit, and what is said where there are
none.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from llorch_serve.bench.energy import EnergyMeter, Gpu, RaplZone, find_energy, gpu_names

ABSENT = "libno-such-library.so.9"


def zone(folder: Path, number: str, name: str, microjoules: int) -> Path:
    path = folder / f"intel-rapl:{number}"
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    (path / "max_energy_range_uj").write_text("1000000000\n")
    return path


def test_packages_and_their_memory_are_counted_and_parts_of_packages_are_not(tmp_path: Path) -> None:
    package = zone(tmp_path, "0", "package-0", 5_000_000)
    zone(tmp_path, "0:0", "core", 1)
    zone(tmp_path, "0:1", "uncore", 1)
    memory = zone(tmp_path, "0:2", "dram", 2_000_000)
    zone(tmp_path, "1", "psys", 1)
    meter = find_energy(tmp_path, ABSENT)
    assert meter.sources == ("intel-rapl:0 package-0", "intel-rapl:0:2 dram")
    assert meter.absent is None
    before = meter.read()
    (package / "energy_uj").write_text("8000000\n")
    (memory / "energy_uj").write_text("2500000\n")
    assert meter.joules_since(before) == pytest.approx(3.5)


def test_a_counter_that_starts_again_is_followed() -> None:
    found = RaplZone("package-0", Path("/nowhere"), range_j=1000.0)
    assert found.between(990.0, 15.0) == 25.0
    assert found.between(15.0, 990.0) == 975.0


def test_without_counters_the_reason_is_told(tmp_path: Path) -> None:
    meter = find_energy(tmp_path, ABSENT)
    assert (meter.sources, meter.joules_since(meter.read())) == ((), None)
    assert meter.absent == f"no RAPL counters under {tmp_path}; no GPUs by {ABSENT}"


def test_a_counter_that_may_not_be_read_is_none_and_named(tmp_path: Path) -> None:
    path = zone(tmp_path, "0", "package-0", 1)
    (path / "energy_uj").unlink()
    (path / "energy_uj").mkdir()  # unreadable for everyone, the superuser too
    meter = find_energy(tmp_path, ABSENT)
    assert meter.sources == ()
    assert meter.absent is not None
    assert "intel-rapl:0 cannot be read" in meter.absent


class Driver:
    """Answers as NVML does."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.millijoules = 1500

    def nvmlDeviceGetTotalEnergyConsumption(self, _handle: object, value: object) -> int:  # noqa: N802 - NVML's name
        value._obj.value = self.millijoules  # type: ignore[attr-defined]
        return self.code


def test_a_gpu_counts_in_millijoules_and_one_that_does_not_says_so() -> None:
    driver = Driver(0)
    card = Gpu("a card", driver, ctypes.c_void_p())  # type: ignore[arg-type]
    meter = EnergyMeter((card,), None)
    before = meter.read()
    assert before == (1.5,)
    driver.millijoules = 4000
    assert meter.joules_since(before) == 2.5
    driver.code = 3
    with pytest.raises(OSError, match="NVML answers 3"):
        card.joules()


def test_a_machine_without_nvidias_driver_has_no_cards_of_theirs() -> None:
    assert gpu_names(ABSENT) == ()
