"""Two parts of a load that are made beside each other: the tokenizer, and the graphs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def made_beside(first: Callable[[], A], second: Callable[[], B], let_go: Callable[[B], None]) -> tuple[A, B]:
    """Return what both make. The first is made on a thread of its own, which the runtime leaves free while it
    loads a graph.

    let_go: of what the second made, if the first fails. If both fail, the first's error is raised, as if it
    had come first.
    """
    with ThreadPoolExecutor(1, "tokenizer") as threads:
        making = threads.submit(first)
        try:
            made = second()
        except Exception:  # raised again, unless the first one has failed too
            making.result()
            raise
        try:
            return making.result(), made
        except BaseException:
            let_go(made)
            raise
