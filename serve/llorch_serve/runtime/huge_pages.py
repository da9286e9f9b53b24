"""Loaded weights in huge pages, where Linux has them.

A step reads every weight once, and in pages of 4 KiB looking up where each lies takes a share of it
(docs/performance.md). The runtime allocates the weights itself and asks for no larger pages, so they are
gathered once it has: the kernel copies each run of small pages into a huge one at the same address
(madvise(2), MADV_COLLAPSE). What has never been touched gets no memory by that, so a cache that grows page by
page still does.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from llorch_serve.errors import UsageError

_MADV_COLLAPSE: Final = 25  # <linux/mman.h>; Python's mmap module has no name for it
_PAGE_SIZE: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MAPS: Final = Path("/proc/self/maps")
_TOTALS: Final = Path("/proc/self/smaps_rollup")

logger = logging.getLogger(__name__)


def require() -> None:
    """Raise UsageError where :func:`gather` can do nothing."""
    if (lack := lacking()) is not None:
        raise UsageError(f"--huge-pages: {lack}; leave it out")


def gather() -> None:
    """Move this process's large allocations into huge pages where the system can. The log tells how much, or
    why not.
    """
    if (lack := lacking()) is not None:
        logger.info("weights stay in small pages: %s", lack)
        return
    began = time.perf_counter()
    page = int(_PAGE_SIZE.read_text(encoding="ascii"))
    # The list is complete before anything moves. A range that is gone by then is refused by the kernel, and
    # no loss.
    for start, end in list(_allocations(_MAPS.read_text(encoding="utf-8", errors="replace"), page)):
        _advise(start, end - start)
    logger.info(
        "%d of %d MiB in huge pages, %.1f s",
        _resident("AnonHugePages") // 2**20,
        _resident("Rss") // 2**20,
        time.perf_counter() - began,
    )


def lacking(platform: str = sys.platform) -> str | None:
    """Return why memory cannot be gathered into huge pages here, or None."""
    if platform != "linux":
        return f"found {platform}, expected Linux"
    if not _PAGE_SIZE.is_file():
        return "this kernel was built without transparent huge pages"
    # On no memory at all, advice that the kernel knows succeeds.
    return None if _advise(0, 0) else "this kernel cannot gather small pages, which takes Linux 6.1"


def _advise(start: int, length: int) -> bool:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(start, length, _MADV_COLLAPSE) == 0)


def _allocations(maps: str, page: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of what is allocated, in whole huge pages. maps: the text of proc_pid_maps(5)."""
    for line in maps.splitlines():
        place, permissions, *rest = line.split(maxsplit=5)
        name = rest[3] if len(rest) > 3 else ""
        # The process's own, writable, of no file: the heap, or a large allocation.
        if permissions != "rw-p" or (name and name != "[heap]"):
            continue
        low, high = (int(address, 16) for address in place.split("-"))
        start, end = -(-low // page) * page, high // page * page
        if start < end:
            yield start, end


def _resident(name: str) -> int:
    """Return bytes of this process's memory as Linux counts them under ``name``."""
    for line in _TOTALS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
