"""Cores of a node for each replica alone, so that replicas do not take turns on the same ones.

Ray counts cores and names none. Here a replica takes some that no other replica of this user has, by a lock
on a file for each, which the system gives back when the process ends. Cores of one NUMA node come first:
replicas with as many cores as a node has get one each.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from llorch_serve.errors import ResourceError

_CPUS: Final = Path("/sys/devices/system/cpu")


def pin_process(count: int) -> frozenset[int] | None:
    """Keep every thread of this process, and those to come, on ``count`` cores that it takes for good.

    Returns them; None where too few are free, or the system cannot do so: threads then run anywhere.
    """
    taken: frozenset[int] | None = None
    if sys.platform == "linux":
        taken = take_cores(count, sorted(os.sched_getaffinity(0)), lock_folder(), where=core_place)
        for thread in _threads() if taken is not None else ():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(thread, taken or ())
    return taken


def take_cores(
    count: int, cores: Sequence[int], locks: Path, *, where: Callable[[int], tuple[int, int]]
) -> frozenset[int] | None:
    """Lock ``count`` of the cores and return them; None where no such set is free.

    locks: the folder of the lock files. where: from a core to its NUMA node and its place in it.
    """
    for chosen in choices(count, cores, where):
        handles: list[int] = []
        for core in chosen:
            handle = _lock(locks / f"core-{core}")
            if handle is None:
                break
            handles.append(handle)
        if len(handles) == count:
            return frozenset(chosen)  # the handles stay open until the process ends
        for handle in handles:
            os.close(handle)
    return None


def choices(
    count: int, cores: Sequence[int], where: Callable[[int], tuple[int, int]]
) -> Iterator[tuple[int, ...]]:
    """Give sets of ``count`` cores, the best first: of one NUMA node, then where they cut up what is left
    least.
    """
    ordered = sorted(cores, key=lambda core: (*where(core), core))
    nodes = [where(core)[0] for core in ordered]

    def price(start: int) -> tuple[int, bool, int]:
        crossed = len(set(nodes[start : start + count]))
        return crossed, (start - nodes.index(nodes[start])) % count != 0, start

    starts = sorted(range(len(ordered) - count + 1), key=price)
    return (tuple(ordered[start : start + count]) for start in starts)


def core_place(core: int) -> tuple[int, int]:
    """Return a core's NUMA node, and the physical core that it is of: its hyperthreads stand side by side."""
    node = next((int(path.name[4:]) for path in _CPUS.glob(f"cpu{core}/node[0-9]*")), 0)
    try:
        physical = int((_CPUS / f"cpu{core}" / "topology" / "core_id").read_text("ascii"))
    except (OSError, ValueError):
        physical = core
    return node, physical


def lock_folder() -> Path:
    """Return the folder of this user's locks. Raises ResourceError where its name is somebody else's."""
    folder = Path(tempfile.gettempdir()) / f"llorch-cores-{_user()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != _user():
        raise ResourceError(
            f"{folder} is not this user's folder, which replicas take their cores by; move it away"
        )
    return folder


def _user() -> int:
    user = 0  # as Windows tells of every file
    if sys.platform != "win32":
        user = os.getuid()
    return user


def _lock(path: Path) -> int | None:
    """Return the handle of a file that is locked now; None where another process has it."""
    handle: int | None = None
    if sys.platform != "win32":
        import fcntl

        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            handle = None
    return handle


def _threads() -> Iterable[int]:
    tasks = Path("/proc/self/task")
    return [int(path.name) for path in tasks.iterdir()] if tasks.is_dir() else [0]
