"""An event loop on a thread of its own, for work that callers of any thread begin and do not wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

R = TypeVar("R")


class LoopThread:
    """Runs until :meth:`close`. name: the thread's. All methods may be called from any other thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call_soon(self, act: Callable[[], object]) -> None:
        """Have something called on the loop; nothing if it has been closed."""
        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def start(self, work: Coroutine[Any, Any, R]) -> Future[R]:
        """Begin something on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Do something on the loop, and return what it returns."""
        return self.start(work).result()

    def close(self) -> None:
        """End the loop and its thread; what still runs is cancelled. Idempotent."""
        if self._loop.is_closed():
            return
        self.run(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
