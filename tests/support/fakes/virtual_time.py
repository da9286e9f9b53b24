"""An event loop whose clock stands still while anything runs and jumps to the next timer when nothing does.

``asyncio.sleep`` takes no time, and what is measured by ``loop.time`` is exactly what was slept.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Never waits; what a loop would have waited for is added to its clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits, and for no moment"
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def stand_still(self, seconds: float) -> None:
        """Let time pass in which nothing else runs, as a long computation would."""
        self._virtual.now += seconds


def run_virtually(make: Callable[[Callable[[], float]], Coroutine[Any, Any, T]]) -> T:
    """Run the coroutine that ``make`` returns when it is given the loop's clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        return runner.run(make(loop.time))
