"""Ends a front whose cluster has lost its head, before Ray ends the process without a word.

Replicas answer on without the head, but none is replaced; after a minute Ray ends every process of the
cluster, drivers too. Input: the head, asked again and again. Output: one line that names it, and a drain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from llorch_serve.calls.interfaces import ReadyWorker
from llorch_serve.cluster.head import HeadAddress
from llorch_serve.engine.load import WorkerState
from llorch_serve.errors import WorkerError

LOST_S: Final = 30.0
"""Without an answer of the head, after which a front drains: half the time that Ray gives it."""

_INTERVAL_S: Final = 2.0

logger = logging.getLogger(__name__)


class HeadWatch:
    """Implements :class:`llorch_serve.calls.interfaces.Companion`.

    answers: asks the head, on any thread, for some seconds at most. lost_s, interval_s: as above.
    """

    def __init__(
        self,
        head: HeadAddress,
        answers: Callable[[], bool],
        *,
        lost_s: float = LOST_S,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self._head = head
        self._answers = answers
        self._lost_s = lost_s
        self._interval_s = interval_s

    async def run(self, worker: ReadyWorker) -> None:
        """Watch until cancelled. Raises WorkerError once the head has not answered for too long."""
        now = asyncio.get_running_loop().time
        answered_s, told = now(), False
        while True:
            if await asyncio.to_thread(self._answers):
                if told:
                    logger.warning("the head of the cluster at %s answers again", self._head)
                answered_s, told = now(), False
            elif now() - answered_s >= self._lost_s:
                raise WorkerError(
                    f"the head of the cluster at {self._head} has not answered for {self._lost_s:g} s, after "
                    "which Ray ends every process of it; start the head again, then this command"
                )
            elif not told:
                logger.warning(
                    "the head of the cluster at %s does not answer; %s answers on for %g s without it",
                    self._head,
                    worker.address,
                    self._lost_s,
                )
                told = True
            await asyncio.sleep(self._interval_s)

    async def tell(self, state: WorkerState) -> None:
        """Have nobody to tell."""
