"""Parts of a matrix, each on a thread: numpy works without the interpreter's lock.

How a matrix is cut must not depend on the number of processors, or last bits would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from llorch_serve.providers import usable_cpus

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST: Final = 8  # more would wait for memory


def in_threads(do: Callable[[slice], None], parts: Sequence[slice]) -> None:
    """Call ``do`` with every part, as many at a time as there are processors, up to 8.

    Requires: no part's result depends on another's.
    """
    if len(parts) < 2:
        for part in parts:
            do(part)
        return
    with ThreadPoolExecutor(min(usable_cpus(), len(parts), _MOST)) as pool:
        for _ in pool.map(do, parts):
            pass  # asks for each result, so that an error is raised here


def in_order(do: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Give what ``do`` makes of every item, in their order. As many are made at a time as there are
    processors, up to 8, and no more are taken ahead.
    """
    most = min(usable_cpus(), _MOST)
    with ThreadPoolExecutor(most) as pool:
        begun: deque[Future[Result]] = deque()
        for item in items:
            begun.append(pool.submit(do, item))
            if len(begun) == most:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
