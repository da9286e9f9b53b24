"""The cores of tests that run side by side: each process of pytest-xdist has some of its own, since runtimes
that share cores with others spend them on waiting for their own threads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_KNOWN = hasattr(os, "sched_setaffinity")
_ALL = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else frozenset[int]()


def take_share() -> None:
    """Confine this process of pytest-xdist, and all that it starts, to its share of the cores: every n-th of
    n processes. Without effect where tests run in one process, or the system knows no affinity.
    """
    name, count = os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if _KNOWN and name is not None:
        os.sched_setaffinity(0, share(sorted(_ALL), int(name.removeprefix("gw")), count))


def share(cores: list[int], place: int, count: int) -> list[int]:
    """Return the cores of one of ``count`` processes: one at least, so that some have the same where there
    are fewer cores than processes. place: beyond ``count`` for one that stands in for a process that ended.
    """
    return cores[place % count :: count] or [cores[place % len(cores)]]


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """Let what is started meanwhile have all cores: it shares them out itself, or is about having several."""
    if not _KNOWN:
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _ALL)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
