"""One HTTP request and its answer: a bounded body in, JSON or server-sent events out, and an eye on the
client.

Input: ASGI's scope, receive and send, as uvicorn gives them. A write waits while the client's socket is full,
and what the engine makes meanwhile is joined in its :class:`llorch_serve.calls.live_call.LiveCall`, so a slow
reader holds the rest of its own answer and one write, and nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Final

import msgspec
from starlette.types import Message, Receive, Scope, Send

from llorch_serve.calls.callers import Caller
from llorch_serve.errors import QueueFullError
from llorch_serve.http.connection import HOLDER
from llorch_serve.http.problems import CLIENT_CLOSED, HttpError, Problem

MAX_BODY_BYTES: Final = 4 * 2**20
"""Largest body taken: beyond what the longest contexts hold as text."""

MAX_BODIES_BYTES: Final = 64 * 2**20
"""Of bodies that are being received, over all connections."""

BODY_TIMEOUT_S: Final = 30.0

KEEP_ALIVE_S: Final = 10.0
"""After so long without a byte a stream gets a comment, as clients and proxies give up on silent ones."""

# Where the guard leaves them in the scope.
CORRELATION: Final = "llorch.correlation_id"
CALLER: Final = "llorch.caller"
# Where a request that came over no connection has its whole caller.
ASKER: Final = "llorch.asker"


class Bodies:
    """What has arrived of bodies that are not whole yet, over all connections."""

    def __init__(self) -> None:
        self.size = 0

    def add(self, size: int) -> None:
        """Count bytes that have arrived. Raises QueueFullError if there are too many."""
        if self.size + size > MAX_BODIES_BYTES:
            found = (
                f"{self.size} bytes of requests are being received, the most is {MAX_BODIES_BYTES}; try again"
            )
            raise QueueFullError(found, retry_after_s=1.0)
        self.size += size


class Exchange:
    """One request. ``started``: the answer's headers are out, so that an error can only be told inside of
    it. ``progress``: what a dialect whose events build on each other has told, for it to tell a failure.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self.started = False
        self.progress: Any = None
        self._events_open = False
        self._written_at = 0.0  # by the loop's clock, in seconds
        self._writing = asyncio.Lock()

    @property
    def method(self) -> str:
        """The request's method."""
        return str(self._scope["method"])

    @property
    def correlation_id(self) -> str:
        """The id that ties this request to the caller's own records."""
        return str(self._scope.get(CORRELATION, ""))

    @property
    def owner(self) -> str:
        """Who asks, where the worker knows its callers; else empty."""
        return str(self._scope.get(CALLER, ""))

    @property
    def holder(self) -> str:
        """Whose client certificate the connection shows; empty if it shows none."""
        return str(self._scope.get("state", {}).get(HOLDER, ""))

    @property
    def client(self) -> str:
        """Who asks, for fairness among clients: the owner, else the address that the connection comes
        from.
        """
        address = self._scope.get("client")
        return self.owner or (f"http:{address[0]}" if address else "http")

    @property
    def caller(self) -> Caller:
        """Who asks, and the ids of their own."""
        asker: Caller | None = self._scope.get(ASKER)
        traceparent = self.header("traceparent") or ""
        return asker or Caller(self.owner, self.client, self.correlation_id, traceparent)

    def header(self, name: str) -> str | None:
        """Return the first header of a lower-case name."""
        key = name.encode()
        for found, value in self._scope["headers"]:
            if found == key:
                return str(value.decode("latin-1"))
        return None

    async def read_body(self, bodies: Bodies, limit: int = MAX_BODY_BYTES) -> bytes:
        """Return the body of a JSON request, which is counted among ``bodies`` until it is whole.

        Raises HttpError if it is another type, too large, too slow or cut off, QueueFullError if too much is
        being received.
        """
        kind = (self.header("content-type") or "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Nor would a browser ask before a page of any other site sends one of the simpler types here.
            raise HttpError(
                415, "unsupported_media_type", f"Content-Type is {kind!r}, expected application/json"
            )
        declared = self.header("content-length") or ""
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise HttpError(
                            CLIENT_CLOSED, "client_closed", "the client left before its body was whole"
                        )
                    piece = message.get("body", b"")
                    if len(body) + len(piece) > limit:
                        raise _too_large(limit)
                    bodies.add(len(piece))
                    body += piece
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError as error:
            found = f"the body did not arrive within {BODY_TIMEOUT_S:g} s; send it again"
            raise HttpError(408, "timeout", found, (("Connection", "close"),)) from error
        finally:
            bodies.size -= len(body)

    async def while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Do ``work``, and cancel it as soon as the client has gone; events that it starts are kept alive. To
        be called once the body is read.
        """
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self._disconnected())
        keeping = asyncio.ensure_future(self._keep_alive())
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, leaving, keeping):
                task.cancel()
            await asyncio.wait((working, leaving, keeping))
            for task in (working, leaving, keeping):
                if not task.cancelled():
                    # else asyncio logs it, words of the request included, where this is cancelled too
                    task.exception()
        try:
            with contextlib.suppress(asyncio.CancelledError):  # the client has gone; there is nobody to tell
                working.result()
        finally:
            # They hold the error, which holds this frame: a circle around the body.
            del working, leaving, keeping, task

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _keep_alive(self) -> None:
        """Send a comment whenever events have been silent for too long."""
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(
                KEEP_ALIVE_S if not self._events_open else self._written_at + KEEP_ALIVE_S - now()
            )
            if self._events_open and now() >= self._written_at + KEEP_ALIVE_S:
                await self._write(b": keep-alive\n\n", more=True)

    async def send_json(
        self, body: object, status: int = 200, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """Send a whole answer."""
        content = msgspec.json.encode(body)
        await self._start(status, "application/json", (("Content-Length", str(len(content))), *headers))
        await self._write(content, more=False)

    async def send_problem(self, problem: Problem, body: object) -> None:
        """Send a refusal as a whole answer."""
        await self.send_json(body, problem.status, problem.headers)

    async def start_events(self) -> None:
        """Send the headers of an answer of events."""
        # The second header keeps nginx from collecting events before it passes them on.
        await self._start(
            200, "text/event-stream", (("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))
        )
        self._events_open = True

    async def send_events(self, *events: tuple[str | None, object]) -> None:
        """Send events in one write, each with its name, if it has one, and what becomes its JSON."""
        pieces = []
        for name, data in events:
            if name is not None:
                pieces.append(b"event: " + name.encode() + b"\n")
            pieces += (b"data: ", msgspec.json.encode(data), b"\n\n")
        await self._write(b"".join(pieces), more=True)

    async def end_events(self) -> None:
        """Send the last event, ``[DONE]``, and end the answer."""
        await self._write(b"data: [DONE]\n\n", more=False)

    async def close_events(self) -> None:
        """End an answer whose own last event says that it is whole."""
        await self._write(b"", more=False)

    async def _start(self, status: int, kind: str, headers: tuple[tuple[str, str], ...]) -> None:
        self.started = True
        self._written_at = asyncio.get_running_loop().time()
        named = (("Content-Type", kind), *headers)
        message: Message = {
            "type": "http.response.start",
            "status": status,
            "headers": [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in named],
        }
        await self._send(message)

    async def _write(self, content: bytes, *, more: bool) -> None:
        """Send a part of the body, the last one unless there is ``more``; one at a time."""
        if not more:
            self._events_open = False
        async with self._writing:
            self._written_at = asyncio.get_running_loop().time()
            await self._send({"type": "http.response.body", "body": content, "more_body": more})


def as_json(value: object) -> msgspec.Raw:
    """Return the JSON of a value, to be sent or to be a part of another."""
    return msgspec.Raw(msgspec.json.encode(value))


def _too_large(limit: int) -> HttpError:
    # What follows of the body is not read, so the connection cannot be used again.
    return HttpError(
        413, "body_too_large", f"the body has more than {limit} bytes; send less", (("Connection", "close"),)
    )
