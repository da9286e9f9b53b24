"""What strangers are sent: within a time, or their connection is cut.

A client that takes nothing (an HTTP/2 window of 0, a socket that is not read) would keep a call for as long
as it likes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final

import grpc

from llorch_serve.rpc.call_limit import Context, until
from llorch_serve.rpc.connections import Connections

LIMIT_S: Final = 10.0  # for a client to take a few bytes
LAST_S: Final = 0.25  # of it, once another call has the place of this one


class Sending:
    """Sends, and cuts who does not take it. One for all that a server sends to strangers."""

    def __init__(self) -> None:
        self._connections = Connections()

    async def send(
        self, context: Context, sending: Awaitable[None], *, evicted: asyncio.Future[None] | None = None
    ) -> None:
        """Wait until a client has been sent something; cut its connection if it does not take it.

        evicted: of the held call. Raises what ``sending`` raises, and CancelledError where no
            more can reach the client.
        """
        sent = await until(sending, evicted=evicted, limit_s=LIMIT_S)
        if not sent.done() and evicted is not None and evicted.done():
            await until(sent, limit_s=LAST_S)
        if not sent.done():
            self._connections.cut(context.peer())
            raise asyncio.CancelledError
        try:
            sent.result()
        except grpc.aio.InternalError:  # it met a connection just closed; the cancellation is due
            raise asyncio.CancelledError from None
