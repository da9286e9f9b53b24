"""All fronts of one worker, the gRPC server and others, led through their life together.

Input: the server, and what makes the other fronts. Output: the same methods as the server's, for
``lifecycle/serving.py``, which need not know how many there are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from llorch_serve.calls.interfaces import FrontFactory
from llorch_serve.engine.load import Load
from llorch_serve.errors import EngineStoppedError
from llorch_serve.requests import TextGenerator
from llorch_serve.rpc.server import WorkerServer

logger = logging.getLogger(__name__)


class Fronts:
    """Made and used on one event loop; :meth:`bind` comes first, :meth:`close` last."""

    def __init__(self, server: WorkerServer, factories: Sequence[FrontFactory]) -> None:
        self._server = server
        self._fronts = tuple(make(server.load) for make in factories)

    @property
    def drain_timeout_s(self) -> float:
        """How long running calls may go on after a signal to stop, in seconds."""
        return self._server.drain_timeout_s

    def load(self) -> Load:
        """Return the worker's state, how far it has loaded and how busy it is."""
        return self._server.load()

    async def wait_unused(self) -> None:
        """Return once nothing has run for the idle timeout, over any front; never if there is none."""
        while True:
            await self._server.wait_unused()
            limit = self._server.idle_timeout_s
            assert limit is not None
            left = limit - min((front.idle_s() for front in self._fronts), default=limit)
            if left <= 0:
                logger.info("no call for %g s; stopping", limit)
                return
            await asyncio.sleep(left)

    async def bind(self) -> str:
        """Listen everywhere; return the gRPC server's HOST:PORT. Raises PortError."""
        address = await self._server.bind()
        for front in self._fronts:
            await front.bind()
        return address

    async def set_ready(self, generator: TextGenerator) -> None:
        """Serve with ``generator``."""
        for front in self._fronts:
            front.set_ready(generator)
        await self._server.set_ready(generator)

    def set_answerable(self, answerable: bool) -> None:
        """Refuse what is new while no replica could answer it, and take it again."""
        self._server.set_answerable(answerable)
        for front in self._fronts:
            front.set_answerable(answerable)

    async def drain(self, forced: asyncio.Event) -> None:
        """Refuse what is new and let what runs finish within the drain timeout or until ``forced``; end the
        rest.
        """
        timeout_s = self._server.drain_timeout_s
        await asyncio.gather(
            self._server.drain(forced), *(front.drain(forced, timeout_s) for front in self._fronts)
        )

    async def fail(self, error: EngineStoppedError) -> None:
        """Refuse what is new for good and end what runs with the engine's error."""
        await asyncio.gather(self._server.fail(error), *(front.fail(error) for front in self._fronts))

    async def close(self) -> None:
        """Stop listening and cut what still runs."""
        await asyncio.gather(self._server.close(), *(front.close() for front in self._fronts))
