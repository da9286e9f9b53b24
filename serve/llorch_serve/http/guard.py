"""What every HTTP request passes first: a correlation id, the bearer token, headers that bind browsers.

Input: uvicorn's events. Output: the same, with the correlation id in the scope and in the answer, or 401. The token is
asked for everywhere but on paths that hold nothing of the model or its users: health, and the files of the page.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llorch_serve.http.exchange import CORRELATION, Exchange
from llorch_serve.http.problems import HttpError, describe
from llorch_serve.observe.tap import Answered

_CORRELATION_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Bearer:
    """A token that requests must carry. Compared in constant time."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def admits(self, header: str | None) -> bool:
        """Tell whether an Authorization header carries the token."""
        scheme, _, given = (header or "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(
            given.strip().encode("latin-1", "replace"), self._token
        )


class Guard:
    """Wraps the whole application."""

    def __init__(
        self,
        app: ASGIApp,
        bearer: Bearer | None,
        open_paths: frozenset[str],
        on_answered: Callable[[Answered], None],
    ) -> None:
        self._app = app
        self._bearer = bearer
        self._open_paths = open_paths
        self._on_answered = on_answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            return
        begun, status = time.perf_counter(), None
        exchange = Exchange(scope, receive, send)
        correlation_id = _correlation_id(exchange.header("x-correlation-id"))
        scope[CORRELATION] = correlation_id
        named = ((b"x-correlation-id", correlation_id.encode()), (b"x-request-id", correlation_id.encode()))

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *named, *_HEADERS]
            await send(message)

        try:
            if scope["path"] in self._open_paths or self._admits(exchange):
                await self._app(scope, receive, answer)
            else:
                await _refuse(Exchange(scope, receive, answer))
        finally:
            seconds = time.perf_counter() - begun
            self._on_answered(Answered(scope["method"], scope["path"], status, seconds, correlation_id))

    def _admits(self, exchange: Exchange) -> bool:
        return self._bearer is None or self._bearer.admits(exchange.header("authorization"))


async def _refuse(exchange: Exchange) -> None:
    found = "no token, or a wrong one; send the header Authorization: Bearer TOKEN"
    error = HttpError(401, "invalid_api_key", found, (("WWW-Authenticate", "Bearer"),))
    problem = describe(error, route="")
    await exchange.send_problem(problem, problem.openai())


def _correlation_id(given: str | None) -> str:
    """Return the caller's id, or one of our own where there is none or one that logs and headers should not carry."""
    return given if given is not None and _CORRELATION_ID.fullmatch(given) else secrets.token_hex(8)
