"""Generation over HTTP, between uvicorn's event loop and a TextGenerator.

Input: a body and the :class:`Dialect` of its route. Requests are decoded, checked, tokenised and submitted on
a small thread pool, as those over gRPC are. Output: what the dialect writes from the calls' updates, or one
problem. A request whose client leaves is aborted at once, queued and in prefill too.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from starlette.types import Receive, Scope, Send

from llorch_serve.calls.admission import Activity, ReadingThreads
from llorch_serve.calls.live import LiveCall, LiveCalls
from llorch_serve.engine.load import Load
from llorch_serve.errors import FieldViolation, InvalidRequestError, UnavailableError
from llorch_serve.http.exchange import Bodies, Exchange
from llorch_serve.http.problems import Problem, describe
from llorch_serve.requests import GenerationRequest, ModelInfo, TextGenerator

MAX_PENDING_BYTES: Final = 64 * 2**20  # of bodies that wait for the pool
LOADING: Final = "the worker is loading its model; try again when GET /health says 200"
STOPPING: Final = "the worker is shutting down; send the request to another"
CUT: Final = "the worker shut down before the answer was complete; send the request to another"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request.

    owner: who it is, where the worker knows its callers; else empty. client: for fairness.
    correlation_id, traceparent: of the caller's records and trace.
    """

    owner: str
    client: str
    correlation_id: str
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one body asks for.

    requests: one for each prompt. stream: the answer is sent as it grows.
    names: from a field's name in an error of the generator to its name in the body.
    detail: whatever the dialect needs to write the answer.
    """

    requests: tuple[GenerationRequest, ...]
    stream: bool
    names: Callable[[str], str]
    detail: Any


class Dialect(Protocol):
    """How one route speaks."""

    def read(self, raw: bytes, info: ModelInfo, caller: Caller) -> Plan:
        """Return what a body asks for. Any thread. Raises InvalidRequestError or ModelMismatchError."""

    async def answer(self, plan: Plan, calls: list[LiveCall], exchange: Exchange) -> None:
        """Take the calls' updates and send the answer."""

    def refusal(self, problem: Problem) -> object:
        """Return the body of a refusal."""

    async def send_failure(self, problem: Problem, exchange: Exchange) -> None:
        """Tell of a failure inside an answer of events, and end it."""


class _Body:
    """What the pool has submitted for one body; ``abandoned`` once its handler has left."""

    __slots__ = ("abandoned", "calls")

    def __init__(self) -> None:
        self.abandoned = False
        self.calls: list[LiveCall] = []

    def leave(self) -> None:
        """Abort what has been submitted, which nobody waits for any more."""
        for call in self.calls:
            call.leave()


class HttpService:
    """Serves one generator. All methods belong to the event loop that it is made on. ``bodies``: those being
    received.

    stream_interval: see :class:`llorch_serve.calls.live.LiveCalls`.
    """

    def __init__(self, load: Callable[[], Load], *, stream_interval: int | None = None) -> None:
        self._load = load
        self._calls = LiveCalls(asyncio.get_running_loop(), stream_interval)
        self._threads = ReadingThreads("llorch-http", MAX_PENDING_BYTES)
        self._activity = Activity()
        self.bodies = Bodies()
        self._generator: TextGenerator | None = None
        self._info: ModelInfo | None = None
        self._refusal: str | None = LOADING

    @property
    def refusal(self) -> str | None:
        """Why no request is taken; None while they are."""
        return self._refusal

    def load(self) -> Load:
        """Return the worker's state, how far it has loaded and how busy it is."""
        return self._load()

    def idle_s(self) -> float:
        """Return for how long no request has run, in seconds."""
        return self._activity.idle_s()

    @property
    def info(self) -> ModelInfo | None:
        """What is served; None until it is loaded."""
        return self._info

    def start(self, generator: TextGenerator) -> None:
        """Take requests from now on."""
        self._generator, self._info, self._refusal = generator, generator.model_info(), None
        self._activity.begin()

    def refuse(self, reason: str) -> None:
        """Take no further requests; those that run go on."""
        self._refusal = reason

    async def wait_idle(self) -> None:
        """Return once no request is running."""
        await self._activity.wait_idle()

    def end_all(self, error: Exception) -> None:
        """End every running request with an error."""
        self._calls.end_all(error)

    def close(self) -> None:
        """Drop what waits for the thread pool and end its threads, without waiting for them."""
        self._threads.close()

    def cancel(self, request_id: str, owner: str) -> None:
        """End a request that came over HTTP from the same caller, if it is live. Idempotent."""
        call = self._calls.find(request_id, owner)
        if call is not None:
            call.cancel()

    async def handle(self, exchange: Exchange, dialect: Dialect, route: str) -> None:
        """Answer one request from its body to its last byte."""
        with self._activity.call():
            try:
                if self._refusal is not None:
                    raise UnavailableError(self._refusal)
                raw = await exchange.read_body(self.bodies)
                await exchange.while_connected(self._generate(raw, exchange, dialect))
            except Exception as error:  # noqa: BLE001 - the boundary: every error becomes a status, bugs are logged there
                problem = describe(error, route=route)
                if exchange.started:
                    await dialect.send_failure(problem, exchange)
                else:
                    await exchange.send_problem(problem, dialect.refusal(problem))

    async def _generate(self, raw: bytes, exchange: Exchange, dialect: Dialect) -> None:
        caller = Caller(
            exchange.owner, exchange.client, exchange.correlation_id, exchange.header("traceparent") or ""
        )
        body = _Body()
        admission = self._threads.admit(len(raw), functools.partial(self._admit, raw, caller, dialect, body))
        try:
            plan = await admission.result()
            for call in body.calls:
                self._calls.admitted(call)
            if plan is not None:
                await self._answer(plan, body.calls, exchange, dialect)
        finally:
            body.abandoned = True
            admission.afterwards(body.leave)

    async def _answer(self, plan: Plan, calls: list[LiveCall], exchange: Exchange, dialect: Dialect) -> None:
        try:
            await dialect.answer(plan, calls, exchange)
        except InvalidRequestError as error:  # what shows only after admission, such as a grammar's faults
            raise _renamed(error, plan) from error

    def _admit(self, raw: bytes, caller: Caller, dialect: Dialect, body: _Body) -> Plan | None:
        """Read, check and submit what a body asks for. A pool thread."""
        if body.abandoned:
            return None
        assert self._generator is not None
        assert self._info is not None
        plan = dialect.read(raw, self._info, caller)
        for request in plan.requests:
            call = self._calls.call(whole=not plan.stream, owner=caller.owner)
            submit = functools.partial(self._generator.submit, replace(request, owner=caller.owner))
            try:
                self._calls.submit(request.request_id, call, submit)
            except InvalidRequestError as error:
                raise _renamed(error, plan) from error
            body.calls.append(call)
        return plan


def _renamed(error: InvalidRequestError, plan: Plan) -> InvalidRequestError:
    """Return the same refusal with the fields' names as the body has them."""
    return InvalidRequestError([FieldViolation(plan.names(v.field), v.description) for v in error.violations])


class GenerationRoute:
    """The ASGI application of one route that generates."""

    def __init__(self, service: HttpService, dialect: Dialect, route: str) -> None:
        self._service = service
        self._dialect = dialect
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._service.handle(Exchange(scope, receive, send), self._dialect, self._route)
