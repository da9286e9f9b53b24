"""Weights are gathered into huge pages where the system can, hold what they held, and the flag is refused
where it does nothing.
"""

from __future__ import annotations

import logging
import mmap
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from llorch_serve.artifact.folder import Artifact
from llorch_serve.config import SessionConfig
from llorch_serve.errors import UsageError
from llorch_serve.loading import models
from llorch_serve.providers import Placement
from llorch_serve.runtime import huge_pages
from support.harness.processes import llorch_here

PAGE = 2**21
# Only a kernel can show that memory moves, and old ones, macOS and Windows cannot. That this skips nothing
# where it can is the first test's to see.
HERE = pytest.mark.skipif(
    huge_pages.lacking() is not None, reason=f"huge pages: {huge_pages.lacking()}, so nothing can be gathered"
)

MAPS = f"""\
{PAGE:x}-{3 * PAGE:x} rw-p 00000000 00:00 0
{4 * PAGE + 4096:x}-{7 * PAGE - 4096:x} rw-p 00000000 00:00 0          [heap]
{8 * PAGE + 4096:x}-{10 * PAGE - 4096:x} rw-p 00000000 00:00 0
{20 * PAGE:x}-{30 * PAGE:x} r--p 00000000 00:00 0
{30 * PAGE:x}-{40 * PAGE:x} rw-s 00000000 00:01 99          /dev/zero (deleted)
{40 * PAGE:x}-{50 * PAGE:x} rw-p 00000000 08:01 12          /a folder/model.onnx.data
{50 * PAGE:x}-{60 * PAGE:x} rw-p 00000000 00:00 0          [stack]
"""


def test_a_kernel_that_can_is_known_as_one() -> None:
    built = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").is_file()
    version = [int(part) for part in re.findall(r"\d+", platform.release())[:2]]
    can = sys.platform == "linux" and built and version >= [6, 1]
    # An older one may have it by its distributor's hand, so nothing is asked of that.
    assert huge_pages.lacking() is None or not can


def test_only_whole_pages_of_the_processs_own_memory_are_taken() -> None:
    found = [(start // PAGE, end // PAGE) for start, end in huge_pages._allocations(MAPS, PAGE)]
    assert found == [(1, 3), (5, 6)]


@pytest.fixture
def memory() -> Iterator[tuple[mmap.mmap, np.ndarray]]:
    """16 MiB of small pages, of which the last 8 have never been touched."""
    area = mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_NOHUGEPAGE)
    numbers = np.frombuffer(area, np.uint8)
    numbers[: 4 * PAGE] = np.random.default_rng(1).integers(0, 256, 4 * PAGE, np.uint8)
    area.madvise(mmap.MADV_HUGEPAGE)  # as memory is that nobody has forbidden it to
    yield area, numbers
    del numbers


def resident(numbers: np.ndarray) -> dict[str, int]:
    """Return KiB of the mapping that holds an array, by Linux's names."""
    found: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name:
            low, high = (int(part, 16) for part in name.split("-"))
            inside = low <= numbers.ctypes.data < high
        elif inside:
            found[name.rstrip(":")] = int(rest.split()[0]) if rest.split()[0].isdigit() else 0
    return found


@HERE
def test_what_is_gathered_holds_what_it_held(
    memory: tuple[mmap.mmap, np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    _, numbers = memory
    held = numbers[: 4 * PAGE].copy()
    before = resident(numbers)
    with caplog.at_level(logging.INFO, logger=huge_pages.__name__):
        huge_pages.gather()
    after = resident(numbers)
    assert before["AnonHugePages"] == 0
    assert after["AnonHugePages"] >= 3 * PAGE // 1024  # the area need not begin where a huge page does
    assert after["Rss"] <= before["Rss"] + PAGE // 1024  # what was never touched is still nowhere
    assert np.array_equal(numbers[: 4 * PAGE], held)
    assert "MiB in huge pages" in caplog.text


@pytest.mark.parametrize(
    ("system", "size_file", "says"),
    [
        ("darwin", __file__, "expected Linux"),
        ("linux", "/nowhere", "without transparent huge pages"),
    ],
)
def test_what_a_system_lacks_is_said(
    system: str, size_file: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_PAGE_SIZE", Path(size_file))
    assert says in str(huge_pages.lacking(system))


def test_advice_that_the_kernel_does_not_know_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_PAGE_SIZE", Path(__file__))
    if sys.platform == "linux":  # its own answer; elsewhere there is no such call to ask
        monkeypatch.setattr(huge_pages, "_MADV_COLLAPSE", 9999)
    else:
        monkeypatch.setattr(huge_pages, "_advise", lambda start, length: False)
    assert "Linux 6.1" in str(huge_pages.lacking("linux"))


@pytest.fixture
def open_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Open a model whose session is none, on a device."""

    def opened(*, wanted: bool | None, device: str = "cpu") -> None:
        session = SimpleNamespace(placement=Placement("P", 1.0, device=device))
        monkeypatch.setattr(models, "_open", lambda *_, **_options: session)
        config = SessionConfig(huge_pages=wanted)
        models.open_model(cast("Artifact", None), config, lambda _report: None)

    return opened


@HERE
@pytest.mark.parametrize(("wanted", "late"), [(None, False), (True, False), (False, True)])
def test_no_graph_is_left_to_be_loaded_where_weights_are_gathered(
    wanted: bool | None, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def opened(*_: object, prompts_first: bool, beside: object) -> SimpleNamespace:
        asked.append(prompts_first)
        return SimpleNamespace(placement=Placement("P", 1.0, device="cpu"))

    monkeypatch.setattr(models, "_open", opened)
    monkeypatch.setattr(huge_pages, "gather", lambda: None)
    config = SessionConfig(huge_pages=wanted)
    models.open_model(cast("Artifact", None), config, lambda _report: None, prompts_first=True)
    assert asked == [late]


@HERE
@pytest.mark.parametrize(("wanted", "told"), [(None, True), (True, True), (False, False)])
def test_a_model_is_gathered_once_loaded(
    open_with: Callable[..., None], wanted: bool | None, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=huge_pages.__name__):
        open_with(wanted=wanted)
    assert ("MiB in huge pages" in caplog.text) is told


def test_where_the_system_cannot_the_flag_is_refused_and_the_default_says_so(
    open_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(huge_pages, "lacking", lambda: "there are none")
    with pytest.raises(UsageError, match="--huge-pages: there are none; leave it out"):
        open_with(wanted=True)
    with caplog.at_level(logging.INFO, logger=huge_pages.__name__):
        open_with(wanted=None)
    assert "weights stay in small pages: there are none" in caplog.text


def test_weights_on_a_device_are_not_gathered(
    open_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "lacking", lambda: None)
    monkeypatch.setattr(huge_pages, "gather", lambda: pytest.fail("gathered"))
    open_with(wanted=None, device="cuda:0")
    with pytest.raises(UsageError, match="lie on cuda:0"):
        open_with(wanted=True, device="cuda:0")


def test_a_running_worker_has_its_own_setting() -> None:
    outcome = llorch_here("bench", "--connect", "127.0.0.1:1", "--huge-pages")
    assert outcome.code == 2
    assert "--huge-pages has no effect on the worker" in outcome.stderr
