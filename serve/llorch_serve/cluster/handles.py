"""Replicas that Ray Serve runs, reached by a handle of their deployment.

Implements :class:`llorch_serve.cluster.interfaces.Replicas`. The process has joined the cluster, see
``connection.py``; which replica gets a request is the business of ``router.py``, which the handle asks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, Final

from llorch_serve.cluster import wire
from llorch_serve.cluster.deploy import DEPLOYMENT, application_of
from llorch_serve.cluster.interfaces import CallKind, Description, ReplicaLoad, RoutingHint
from llorch_serve.cluster.ray_internals import ask_all, direct, own_handle
from llorch_serve.cluster.silence import Silence

LOOK_S: Final = 5.0
"""How long a replica may take to say how busy it is."""

_ANSWER_S: Final = 10.0  # after which it is said in the log that no replica is there yet

logger = logging.getLogger(__name__)


class HandleReplicas:
    """The replicas of one model. handle: of their deployment, for these alone. fingerprint: of the model."""

    def __init__(self, handle: Any, fingerprint: str) -> None:
        self._handle = handle
        self._fingerprint = fingerprint
        self._calls = direct(handle, "call")
        self._silence = Silence()

    async def call(self, kind: CallKind, raw: bytes, *, hint: RoutingHint) -> AsyncGenerator[bytes, None]:
        """Have one replica answer a request; give its answer's parts. Closing it ends the request.

        Raises Ray's errors, which ``failures.py`` tells apart.
        """
        with self._silence.watched() as watched:
            response = self._calls.remote(kind, raw, replace(hint, on_sent=watched.sent(hint.on_sent)))
            watched.end_by(response.cancel)
            ended = False
            try:
                async for part in response:
                    watched.heard()
                    yield part
                ended = True
            finally:
                if not ended:
                    response.cancel()

    async def describe(self) -> Description:
        """Return what a replica says of itself, once one is there."""
        asked = self._handle.options(method_name="describe").remote(
            RoutingHint("", fingerprint=self._fingerprint)
        )
        answer = asyncio.ensure_future(_result(asked))
        while not (await asyncio.wait((answer,), timeout=_ANSWER_S))[0]:
            logger.info("waiting for a replica of %s", self._fingerprint)
        return wire.read_description(answer.result())

    async def loads(self) -> Sequence[ReplicaLoad]:
        """Return how busy each replica is that says so in time."""
        return [wire.read_load(raw) for raw in await self._all("load")]

    async def abort(self, request_ids: Sequence[str], owner: str) -> tuple[str, ...]:
        """End a caller's live requests in every replica; return the ids of those that were live."""
        ended = await self._all("abort", tuple(request_ids), owner)
        return tuple(dict.fromkeys(id_ for ids in ended for id_ in ids))

    async def _all(self, method: str, *arguments: object) -> list[Any]:
        return await ask_all(self._handle, method, arguments, LOOK_S)

    async def close(self) -> None:
        """Let go of the replicas, which go on."""
        await asyncio.to_thread(self._handle.shutdown)


def find_replicas(model: str, fingerprint: str) -> HandleReplicas:
    """Return the replicas of a deployed model."""
    return HandleReplicas(own_handle(DEPLOYMENT, application_of(model)), fingerprint)


async def _result(response: Any) -> Any:
    return await response
