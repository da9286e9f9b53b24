"""Generation over HTTP, between uvicorn's event loop and a TextGenerator.

Input: a body and the :class:`Dialect` of its route. Requests are decoded, checked, tokenised and submitted on
a small thread pool, as those over gRPC are. Output: what the dialect writes from the calls' updates, or one
problem. A request whose client leaves is aborted at once, queued and in prefill too.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from starlette.types import Receive, Scope, Send

from llorch_serve.calls.callers import Caller
from llorch_serve.calls.front_desk import FrontDesk, MessageCalls
from llorch_serve.calls.live_call import LiveCall
from llorch_serve.engine.load import Load
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.http.exchange import Bodies, Exchange
from llorch_serve.http.problems import Problem, describe
from llorch_serve.http.shapes import refusal_body
from llorch_serve.requests import (
    Abort,
    EmbedRequest,
    GenerationRequest,
    ModelInfo,
    RankRequest,
    ScoreRequest,
    TextGenerator,
    UpdateSink,
)

Request: TypeAlias = GenerationRequest | ScoreRequest | RankRequest | EmbedRequest
"""What a body may ask a generator for."""


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How the answer to one body is written. Kept until its end, so it holds none of the body's texts.

    stream: the answer is sent as it grows.
    names: from a field's name in an error of the generator to its name in the body.
    detail: whatever the dialect needs to write the answer.
    """

    stream: bool
    names: Callable[[str], str]
    detail: Any


@dataclass(frozen=True, slots=True)
class Plan:
    """What one body asks for. requests: one for each prompt."""

    requests: tuple[Request, ...]
    answer: AnswerPlan


class Dialect(Protocol):
    """How one route speaks."""

    def read(self, raw: bytes, info: ModelInfo, caller: Caller) -> Plan:
        """Return what a body asks for. Any thread. Raises InvalidRequestError or ModelMismatchError."""

    async def answer(self, plan: AnswerPlan, calls: list[LiveCall], exchange: Exchange) -> None:
        """Take the calls' updates and send the answer."""

    def refusal(self, problem: Problem) -> object:
        """Return the body of a refusal."""

    async def send_failure(self, problem: Problem, exchange: Exchange) -> None:
        """Tell of a failure inside an answer of events, and end it."""


_Admitted = tuple[AnswerPlan, list[LiveCall]]
"""How a body is answered, and a call for each of its requests."""


Computation = Callable[[bytes, TextGenerator, ModelInfo, Caller], object]
"""Makes the answer of a body, on any thread. Raises InvalidRequestError or ModelMismatchError."""


class HttpService:
    """Serves what its front desk admits. All methods belong to the event loop that it is made on.

    load: returns the worker's state, how far it has loaded and how busy it is. bodies: those being received.
    """

    def __init__(self, desk: FrontDesk, load: Callable[[], Load]) -> None:
        self._desk = desk
        self.load = load
        self.bodies = Bodies()

    @property
    def refusal(self) -> str | None:
        """Why no request is taken; None while they are."""
        return self._desk.refusal

    @property
    def info(self) -> ModelInfo | None:
        """What is served; None until it is loaded."""
        return self._desk.info

    def check_open(self) -> None:
        """Raise UnavailableError, with the reason, while no request is taken."""
        self._desk.check_open()

    def call(self) -> AbstractContextManager[None]:
        """Count a request for as long as it runs."""
        return self._desk.call()

    async def cancel(self, request_id: str, owner: str) -> None:
        """End a request that came over HTTP from the same caller, if it is live. Idempotent."""
        await self._desk.cancel_everywhere((request_id,), owner)

    async def handle(self, exchange: Exchange, dialect: Dialect, route: str) -> None:
        """Answer one request from its body to its last byte."""

        async def generate() -> None:
            # No local holds the body, which would be kept for as long as the answer takes.
            body = exchange.read_body(self.bodies)
            await exchange.while_connected(self._generate(await body, exchange, dialect))

        with self._desk.call():
            problem = await self._attempt(generate, route)
            if problem is None:
                return
            if exchange.started:
                await dialect.send_failure(problem, exchange)
            else:
                await exchange.send_problem(problem, dialect.refusal(problem))

    async def compute(self, exchange: Exchange, computation: Computation, route: str) -> None:
        """Answer one request that needs no engine."""

        async def work() -> None:
            body = exchange.read_body(self.bodies)
            await exchange.send_json(await self._compute(await body, exchange, computation))

        with self._desk.call():
            problem = await self._attempt(work, route)
            if problem is not None and not exchange.started:
                await exchange.send_problem(problem, refusal_body(problem, route))

    async def _compute(self, raw: bytes, exchange: Exchange, computation: Computation) -> object:
        """Have a body computed on a reading thread."""
        generator, info = self._desk.generator, self._desk.info
        assert info is not None
        work = functools.partial(computation, raw, generator, info, exchange.caller)
        return await self._desk.run(len(raw), work)

    async def _attempt(self, work: Callable[[], Awaitable[None]], route: str) -> Problem | None:
        """Do the work of a request; return the problem that it ends with, if it does.

        It is told later, and not while the error is handled, which holds the body.
        """
        try:
            self._desk.check_open()
            await work()
        except Exception as error:  # noqa: BLE001 - the boundary: every error becomes a status, bugs are logged there
            return describe(error, route=route)
        return None

    async def _generate(self, raw: bytes, exchange: Exchange, dialect: Dialect) -> None:
        caller = exchange.caller
        read = functools.partial(self._submit, raw, caller, dialect)
        admission = self._desk.admit(len(raw), caller.owner, read)
        del raw, read  # as above
        async with admission as (plan, calls):
            try:
                await dialect.answer(plan, calls, exchange)
            except InvalidRequestError as error:  # some show after admission, as a grammar's faults do
                raise error.renamed(plan.names) from error

    def _submit(self, raw: bytes, caller: Caller, dialect: Dialect, calls: MessageCalls) -> _Admitted:
        """Read a body and submit what it asks for. A pool thread."""
        generator, info = self._desk.generator, self._desk.info
        assert info is not None
        plan = dialect.read(raw, info, caller)
        if plan.answer.stream and caller.identity is not None:
            found = "true, and such an answer comes whole; leave it out"
            raise InvalidRequestError([FieldViolation("stream", found)])
        submitted = []
        for request in plan.requests:
            owned = replace(_seeded(request, caller), owner=caller.owner)
            submit = _submission(generator, owned)
            try:
                submitted.append(calls.submit(request.request_id, submit, whole=not plan.answer.stream))
            except InvalidRequestError as error:
                raise error.renamed(plan.answer.names) from error
        return plan.answer, submitted


def _seeded(request: Request, caller: Caller) -> Request:
    """Return a request with the seed of an answer whose identity is decided on, unless it names one."""
    if caller.identity is None or not isinstance(request, GenerationRequest):
        return request
    if request.sampling.seed is not None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=caller.identity.seed))


def _submission(generator: TextGenerator, request: Request) -> Callable[[UpdateSink], Abort]:
    """Return what submits a request, once it is given where updates go."""
    match request:
        case ScoreRequest():
            return functools.partial(generator.submit_score, request)
        case RankRequest():
            return functools.partial(generator.submit_rank, request)
        case EmbedRequest():
            return functools.partial(generator.submit_embedding, request)
        case _:
            return functools.partial(generator.submit, request)


class GenerationRoute:
    """The ASGI application of one route that generates."""

    def __init__(self, service: HttpService, dialect: Dialect, route: str) -> None:
        self._service = service
        self._dialect = dialect
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._service.handle(Exchange(scope, receive, send), self._dialect, self._route)


class ComputedRoute:
    """The ASGI application of one route that is answered without the engine."""

    def __init__(self, service: HttpService, computation: Computation, route: str) -> None:
        self._service = service
        self._computation = computation
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._service.compute(Exchange(scope, receive, send), self._computation, self._route)
