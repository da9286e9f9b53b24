"""Parts of a matrix, each on a thread: numpy works without the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from llorch_serve.providers import usable_cpus

_MOST: Final = 8  # more would wait for memory


def in_threads(do: Callable[[slice], None], parts: Sequence[slice]) -> None:
    """Call ``do`` with every part, as many at a time as there are processors, up to 8.

    Requires: no part's result depends on another's. How a matrix is cut must not depend on the number of
    processors, or last bits would.
    """
    if len(parts) < 2:
        for part in parts:
            do(part)
        return
    with ThreadPoolExecutor(min(usable_cpus(), len(parts), _MOST)) as pool:
        for _ in pool.map(do, parts):
            pass  # asks for each result, so that an error is raised here
