"""What one input may take: processor time and memory, beyond which a parser is at the mercy of its input."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

SECONDS: Final = 1.0
"""Processor time of one input; not the clock's, so that a busy machine makes no findings."""

MEMORY_MIB: Final = 512
"""Resident memory of the whole process, libraries and instrumentation included."""


class TooSlowError(Exception):
    """An input took more than :data:`SECONDS`."""


def timed(
    run: Callable[[bytes], None], *, clock: Callable[[], float] = time.process_time
) -> Callable[[bytes], None]:
    """Return ``run`` with its limit of time; it raises TooSlowError. clock: of processor time, in seconds."""

    def one(data: bytes) -> None:
        before = clock()
        run(data)
        taken = clock() - before
        if taken > SECONDS:
            raise TooSlowError(f"{taken:.2f} s of processor time for {len(data)} bytes")

    return one
