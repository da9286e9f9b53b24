"""The HTTP front's routes without a socket: what answers the lines of a batch.

Input: a line's url and body. Output: what the route at that url answers, in the same bytes whenever it is
asked: ids, times and seeds are derived from the run and the line, and what varies is left out. Whoever asks
brings the routes (:func:`llorch_serve.http.app.make_routes`), or a generator that routes are made around.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

import msgspec
from starlette.types import ASGIApp, Message, Scope

from llorch_serve.batch.answering import BatchStoppedError, LineAnswer
from llorch_serve.batch.lines import URLS, BatchLine
from llorch_serve.batch.records import derived_id
from llorch_serve.calls.callers import AnswerIdentity, Caller
from llorch_serve.calls.front_desk import FrontDesk
from llorch_serve.errors import LlorchError
from llorch_serve.http.app import make_routes
from llorch_serve.http.exchange import ASKER, CALLER, CORRELATION
from llorch_serve.http.problems import Problem
from llorch_serve.http.service import HttpService
from llorch_serve.http.settled import settled
from llorch_serve.http.unknown_fields import UnknownFields
from llorch_serve.requests import TextGenerator

MAX_PENDING_BYTES: Final = 64 * 2**20  # of bodies that wait to be read
_SEED_BITS: Final = 63


@dataclass(frozen=True, slots=True)
class AskingRun:
    """Whose lines are asked, and what their answers are told to be.

    run_id: what ids derive from. owner: the caller that the run is of, where the worker knows its callers;
    else empty. client: for fairness among clients. created: the time that answers tell, in seconds since
    1970; None: the clock's.
    """

    run_id: str
    owner: str = ""
    client: str = "batch"
    created: int | None = 0


def never_stopped() -> None:
    """Go on whatever an answer is."""


class InnerAnswerer:
    """Implements :class:`llorch_serve.batch.answering.Answerer` on routes, on whose event loop it is used.

    stopped: why no line can be answered any more; None while some can.
    """

    def __init__(
        self,
        routes: ASGIApp,
        run: AskingRun,
        stopped: Callable[[], LlorchError | None] = never_stopped,
    ) -> None:
        self._routes = routes
        self._run = run
        self._stopped = stopped

    async def answer(self, line: BatchLine) -> LineAnswer:
        """Answer one line. Raises BatchStoppedError once nothing answers any more."""
        request_id = derived_id("req_", self._run.run_id, line.custom_id)
        if line.url not in URLS:  # others do more than to answer
            found = f"a line asks for {line.url[:100]!r}; expected {' or '.join(URLS)}"
            problem = Problem(404, "invalid_request_error", "not_found", found)
            return LineAnswer(404, request_id, msgspec.json.encode(problem.openai()))
        caller = Caller(self._run.owner, self._run.client, request_id, identity=self._identity(line))
        exchange = _InnerExchange(line.body)
        await self._routes(_scope(line, caller), exchange.receive, exchange.send)
        if exchange.status >= 400 and (why := self._stopped()) is not None:
            raise BatchStoppedError(str(why)) from why
        body, usage = settled(exchange.body)
        return LineAnswer(exchange.status, request_id, body, exchange.retry_after_s, usage)

    def _identity(self, line: BatchLine) -> AnswerIdentity:
        digest = hashlib.sha256(line.custom_id.encode("utf-8", "surrogatepass")).digest()
        seed = int.from_bytes(digest[:8]) >> (64 - _SEED_BITS)
        name = derived_id("", self._run.run_id, line.custom_id)
        return AnswerIdentity(name, self._run.created, seed)


class _InnerExchange:
    """One request whose client stays until the answer is there."""

    def __init__(self, body: bytes) -> None:
        self._request = body
        self._is_asked = False
        self._pieces: list[bytes] = []
        self.status = 500
        self.retry_after_s: float | None = None

    @property
    def body(self) -> bytes:
        """What has been answered."""
        return b"".join(self._pieces)

    async def receive(self) -> Message:
        """Give the body, and then nothing any more."""
        if self._is_asked:
            await asyncio.get_running_loop().create_future()
        self._is_asked = True
        body, self._request = self._request, b""
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Take a part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = dict(message["headers"])
            if (after := headers.get(b"retry-after")) is not None:
                self.retry_after_s = float(after)
        else:
            self._pieces.append(message.get("body", b""))


def _scope(line: BatchLine, caller: Caller) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": line.url,
        "raw_path": line.url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        CALLER: caller.owner,
        CORRELATION: caller.correlation_id,
        ASKER: caller,
    }


@contextlib.asynccontextmanager
async def routes_around(
    generator: TextGenerator, unknown: UnknownFields = UnknownFields.REFUSE
) -> AsyncIterator[ASGIApp]:
    """Give routes that answer with a generator. unknown: what becomes of fields that they do not know."""
    desk = FrontDesk("llorch-batch", "", max_pending_bytes=MAX_PENDING_BYTES, stream_interval=None)
    desk.open(generator)
    try:
        yield make_routes(HttpService(desk, generator.load), lambda: (b"", "text/plain"), unknown)
    finally:
        desk.close()
