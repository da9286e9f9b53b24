"""A front's eye on its cluster: whether the head is there, and whether the model is still the one it opened.

Without its head a cluster goes on answering for a while, and then every process of it ends, whatever runs. So
a front that has lost the head for long says so, lets running answers end, and ends. It does the same where
the model was deployed anew from another artifact: its tokens are another's now.
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
from llorch_serve.cluster.head import HeadAddress, is_alive
from llorch_serve.engine.load import WorkerState
from llorch_serve.errors import WorkerError

LOST_S: Final = 30.0
"""How long a head may not answer. Ray's own processes wait for 60 s."""
LOOK_S: Final = 2.0
MODEL_LOOK_S: Final = 15.0  # the controller of a large cluster has better things to do

logger = logging.getLogger(__name__)


class ClusterWatch:
    """Implements :class:`llorch_serve.calls.interfaces.Companion`.

    head: where the cluster's head is, once it is joined. is_current: whether the model is still deployed as
        it was opened; both on any thread.
    """

    def __init__(
        self,
        head: Callable[[], HeadAddress],
        is_current: Callable[[], bool],
        *,
        lost_s: float = LOST_S,
        look_s: float = LOOK_S,
        model_look_s: float = MODEL_LOOK_S,
        alive: Callable[[HeadAddress], bool] = is_alive,
    ) -> None:
        self._head = head
        self._is_current = is_current
        self._lost_s = lost_s
        self._look_s = look_s
        self._model_look_s = model_look_s
        self._alive = alive

    async def run(self, worker: ReadyWorker) -> None:
        """Look again and again. Raises WorkerError for a head that is lost and a model that is another."""
        head = self._head()
        seen = looked = time.monotonic()
        looking: asyncio.Future[bool] | None = None
        while True:
            await asyncio.sleep(self._look_s)
            if not await asyncio.to_thread(self._alive, head):
                if time.monotonic() - seen >= self._lost_s:
                    raise WorkerError(
                        f"the head of the cluster at {head} has not answered for {self._lost_s:g} s, and the "
                        "cluster ends without it; start the head again, deploy, and start this front again"
                    )
                continue
            seen = time.monotonic()
            if looking is None and seen - looked >= self._model_look_s:
                looked = seen
                looking = _on_daemon_thread(self._is_current)
            if looking is not None and looking.done():
                if _is_another(looking):
                    raise WorkerError(
                        "the model was deployed anew from another artifact, or deleted; start this front "
                        "again"
                    )
                looking = None

    async def tell(self, state: WorkerState) -> None:
        """Have nothing to tell anybody."""


def _is_another(looked: asyncio.Future[bool]) -> bool:
    """Tell whether a look found another model. One that failed has found nothing: a controller may be on its
    way to another node.
    """
    if (error := looked.exception()) is None:
        return not looked.result()
    logger.warning("it is not known whether the model is still the same: %s", type(error).__name__)
    return False


def _on_daemon_thread(ask: Callable[[], bool]) -> asyncio.Future[bool]:
    """Ask on a thread that keeps nothing waiting: without its head, Ray may never answer."""
    answer: Future[bool] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # noqa: BLE001 - passed on to who looks at the answer
            answer.set_exception(error)

    threading.Thread(target=run, name="llorch-watch", daemon=True).start()
    return asyncio.wrap_future(answer)
