"""When a pool manager is told what: ready with back-off, heartbeats, and the worker's last words.

A companion of ``lifecycle/serving.py``: it starts once the worker serves. A manager that cannot be reached is
tried again for as long as the worker lives; one that answers and refuses ends the worker. A manager that
comes back and has forgotten the worker says so by answering a heartbeat with 404 or 410, and is told anew.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from llorch_serve.calls.interfaces import ReadyWorker
from llorch_serve.cluster.totals import totals_of
from llorch_serve.engine.load import NOTHING, WorkerState
from llorch_serve.errors import WorkerError
from llorch_serve.pool.messages import heartbeat, ready
from llorch_serve.pool.post import CallbackUrl, Poster
from llorch_serve.requests import ModelInfo

_FORGOTTEN: Final = frozenset({404, 410})
_LATER: Final = frozenset({408, 425, 429})  # among the refusals, those that ask for patience
_FAREWELL_S: Final = 2.0  # a draining worker does not wait longer for its manager

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Who is told, and what of.

    host: under which the manager's clients reach this worker. secure: over TLS.
    heartbeat_s, timeout_s: interval and patience, in seconds. first_pause_s, longest_pause_s: between tries
        to be heard, doubling. most_refusals: in a row, after which the worker gives up.
    """

    worker_id: str
    url: CallbackUrl
    host: str
    secure: bool = False
    model_ref: str | None = None
    heartbeat_s: float = 30.0
    timeout_s: float = 5.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    most_refusals: int = 5


class PoolReporter:
    """Implements :class:`llorch_serve.calls.interfaces.Companion`.

    http_url: returns where the HTTP front listens, as scheme://HOST:PORT; None: there is none.
    """

    def __init__(self, config: PoolConfig, *, http_url: Callable[[], str | None] = lambda: None) -> None:
        self._config = config
        self._http_url = http_url
        self._poster = Poster(config.url)
        self._worker: ReadyWorker | None = None

    async def run(self, worker: ReadyWorker) -> None:
        """Say that the worker is ready, then how it is, until cancelled.

        Raises WorkerError if the manager keeps refusing it.
        """
        self._worker = worker
        told = await self._register(worker)
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            load = worker.load()
            status = await self._beat(worker, load.state, self._config.timeout_s)
            # A front of replicas may have come to serve another model.
            if status in _FORGOTTEN or worker.generator.model_info() != told:
                told = await self._register(worker)

    async def tell(self, state: WorkerState) -> None:
        """Send one heartbeat with that state; a manager that does not take it within two seconds goes
        without.
        """
        await self._beat(self._worker, state, min(_FAREWELL_S, self._config.timeout_s))

    async def _register(self, worker: ReadyWorker) -> ModelInfo:
        """Say that the worker is ready until that is heard; return what it serves, as that was told."""
        config, refusals, pause_s = self._config, 0, self._config.first_pause_s
        while True:
            url, info = self._http_url(), worker.generator.model_info()
            message = await asyncio.to_thread(
                ready,
                info,
                worker_id=config.worker_id,
                model_ref=config.model_ref,
                uri=self._advertised("grpcs" if config.secure else "grpc", worker.address),
                http_uri=None if url is None else self._advertised(*url.split("://")),
                totals=totals_of(worker.generator),
            )
            status = await self._send(message, "ready", config.timeout_s)
            if status is not None and 200 <= status < 300:
                logger.info("the pool manager at %s knows this worker as %s", config.url, config.worker_id)
                return info
            refused = status is not None and 300 <= status < 500 and status not in _LATER
            refusals = refusals + 1 if refused else 0
            if refusals >= config.most_refusals:
                raise WorkerError(
                    f"the pool manager at {config.url} refused this worker {refusals} times, at last with "
                    f"HTTP "
                    f"{status}; check --callback-url and --worker-id {config.worker_id}"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, config.longest_pause_s)

    def _advertised(self, scheme: str, bound: str) -> str:
        """Return the URI by which the manager's clients reach a port. bound: HOST:PORT."""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"{scheme}://{host}:{bound.rsplit(':', 1)[1]}"

    async def _beat(self, worker: ReadyWorker | None, state: WorkerState, timeout_s: float) -> int | None:
        load = NOTHING if worker is None else worker.load()
        return await self._send(heartbeat(self._config.worker_id, load, state), "heartbeat", timeout_s)

    async def _send(self, message: msgspec.Struct, what: str, timeout_s: float) -> int | None:
        """Return the manager's status; None if there is none. What went wrong is logged."""
        try:
            status = await self._poster.post(msgspec.json.encode(message), timeout_s=timeout_s)
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            logger.warning("%s did not reach the pool manager at %s: %s", what, self._config.url, reason)
            return None
        if not 200 <= status < 300:
            logger.warning("the pool manager at %s answered %s with HTTP %d", self._config.url, what, status)
        return status
