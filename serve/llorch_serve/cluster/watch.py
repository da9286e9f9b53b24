"""A front's eye on its cluster: whether the head is there, and what is deployed as its model.

Without its head a cluster goes on answering for a while, and then every process of it ends, whatever runs. So
a front that has lost the head for long says so, lets running answers end, and ends. A model that was deployed
anew from another artifact is opened beside the other, see ``follow.py``; where it cannot be, the front ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from llorch_serve.calls.interfaces import ReadyWorker
from llorch_serve.cluster.follow import MODEL_LOOK_S
from llorch_serve.cluster.head import HeadAddress, is_alive
from llorch_serve.engine.load import WorkerState
from llorch_serve.errors import WorkerError

LOST_S: Final = 30.0
"""How long a head may not answer. Ray's own processes wait for 60 s."""
LOOK_S: Final = 2.0

logger = logging.getLogger(__name__)


class ClusterWatch:
    """Implements :class:`llorch_serve.calls.interfaces.Companion`.

    head: where the cluster's head is, once it is joined. follow: has the front serve what is deployed, and
        raises WorkerError where it cannot; it may take minutes. is_urgent: whether it is to look now. All on
        any thread.
    """

    def __init__(
        self,
        head: Callable[[], HeadAddress],
        follow: Callable[[], None],
        *,
        is_urgent: Callable[[], bool] = lambda: False,
        lost_s: float = LOST_S,
        look_s: float = LOOK_S,
        model_look_s: float = MODEL_LOOK_S,
        alive: Callable[[HeadAddress], bool] = is_alive,
    ) -> None:
        self._head = head
        self._follow = follow
        self._is_urgent = is_urgent
        self._lost_s = lost_s
        self._look_s = look_s
        self._model_look_s = model_look_s
        self._alive = alive

    async def run(self, worker: ReadyWorker) -> None:
        """Look again and again. Raises WorkerError for a head that is lost and a model that cannot be
        served.
        """
        looking: asyncio.Future[None] | None = None
        head = self._head()
        seen = looked = time.monotonic()
        try:
            while True:
                await asyncio.sleep(self._look_s)
                if not await asyncio.to_thread(self._alive, head):
                    if time.monotonic() - seen >= self._lost_s:
                        raise self._lost(head)
                    continue
                seen = time.monotonic()
                if looking is None and (seen - looked >= self._model_look_s or self._is_urgent()):
                    looked = seen
                    looking = _on_daemon_thread(self._follow)
                if looking is not None and looking.done():
                    _check(looking)
                    looking = None
        finally:
            if looking is not None:
                looking.cancel()  # its thread goes on, and tells nobody

    def _lost(self, head: HeadAddress) -> WorkerError:
        return WorkerError(
            f"the head of the cluster at {head} has not answered for {self._lost_s:g} s, and the cluster "
            "ends without it; start the head again, deploy, and start this front again"
        )

    async def tell(self, state: WorkerState) -> None:
        """Have nothing to tell anybody."""


def _check(looked: asyncio.Future[None]) -> None:
    """Raise the WorkerError that a look ended with. One that failed otherwise has found nothing: a controller
    may be on its way to another node.
    """
    error = looked.exception()
    if isinstance(error, WorkerError):
        raise error
    if error is not None:
        logger.warning("it is not known whether the model is still the same: %s", type(error).__name__)


def _on_daemon_thread(look: Callable[[], None]) -> asyncio.Future[None]:
    """Look on a thread that keeps nothing waiting: without its head, Ray may never answer."""
    answer: Future[None] = Future()

    def run() -> None:
        answer.set_running_or_notify_cancel()
        try:
            look()
            answer.set_result(None)
        except BaseException as error:  # noqa: BLE001 - passed on to who looks at the answer
            answer.set_exception(error)

    threading.Thread(target=run, name="llorch-watch", daemon=True).start()
    return asyncio.wrap_future(answer)
