"""Two parts of a load that are made beside each other: what turns text into tokens, and the graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def made_beside(first: Callable[[], A], second: Callable[[], B], let_go: Callable[[B], None]) -> tuple[A, B]:
    """Return what both make. The second is made on a thread of its own: it is the one that leaves
    the interpreter free, as the runtime does while it loads a graph.

    let_go: of what the second made, if the first fails. If both fail, the first's error is raised, as if it
    had come first.
    """
    with ThreadPoolExecutor(1, "graphs") as threads:
        making = threads.submit(second)
        try:
            made = first()
        except BaseException:
            with contextlib.suppress(Exception):
                let_go(making.result())
            raise
        return made, making.result()
