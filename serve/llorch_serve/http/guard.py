"""What every HTTP request passes first: a correlation id, the bearer token, headers that bind browsers.

Input: uvicorn's events. Output: the same, with the correlation id in the scope and in the answer, or 401, or
403 for a page of another site that a browser was led to take for this worker's, or 503 where too many
requests run.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llorch_serve.calls.correlation import plain_id
from llorch_serve.http.connection import PLACE
from llorch_serve.http.exchange import CALLER, CORRELATION, Exchange
from llorch_serve.http.places import Place
from llorch_serve.http.problems import HttpError, describe
from llorch_serve.observe.tap import Answered

_PORT: Final = re.compile(r":\d*$")
_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Bearer:
    """Tokens of which requests must carry one. Compared in constant time, by their digests."""

    def __init__(self, tokens: tuple[str, ...]) -> None:
        self._digests = tuple(_digest(token.encode()) for token in tokens)

    def caller(self, header: str | None) -> str | None:
        """Return a name for whoever an Authorization header's token belongs to, fit to be logged; None:
        nobody's.
        """
        scheme, _, given = (header or "").partition(" ")
        digest = _digest(given.strip().encode("latin-1", "replace"))
        known = [hmac.compare_digest(digest, expected) for expected in self._digests]
        return f"token:{digest[:16]}" if scheme.lower() == "bearer" and any(known) else None


def _digest(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask for what.

    bearer: the tokens of which requests must carry one; None: none.
    open_paths: paths that need no token.
    hosts: names under which the worker may be addressed (the header Host, without its port); None: any. On
        the loopback a site whose name is made to point here would otherwise be let in by browsers as if it
        were this worker's own page.
    """

    bearer: Bearer | None
    open_paths: frozenset[str]
    hosts: frozenset[str] | None

    def admit(self, exchange: Exchange, path: str) -> str:
        """Return who asks, empty where that cannot be told. Raises HttpError for what is refused."""
        host = _PORT.sub("", exchange.header("host") or "").lower()
        if self.hosts is not None and host not in self.hosts:
            known = ", ".join(sorted(self.hosts))
            raise HttpError(403, "unknown_host", f"Host is {host[:100]!r}, expected one of {known}")
        if self.bearer is None:
            return exchange.holder
        caller = self.bearer.caller(exchange.header("authorization"))
        if caller is None and path not in self.open_paths:
            found = "no token, or a wrong one; send the header Authorization: Bearer TOKEN"
            raise HttpError(401, "invalid_api_key", found, (("WWW-Authenticate", "Bearer"),))
        return exchange.holder or caller or ""


class Guard:
    """Wraps the whole application."""

    def __init__(self, app: ASGIApp, access: Access, on_answered: Callable[[Answered], None]) -> None:
        self._app = app
        self._access = access
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
            scope[CALLER] = self._access.admit(exchange, scope["path"])
            with self._kept(scope):
                await self._app(scope, receive, answer)
        except HttpError as error:
            problem = describe(error, route="")
            await Exchange(scope, receive, answer).send_problem(problem, problem.openai())
        finally:
            seconds = time.perf_counter() - begun
            self._on_answered(Answered(scope["method"], scope["path"], status, seconds, correlation_id))

    def _kept(self, scope: Scope) -> contextlib.AbstractContextManager[None]:
        """Keep the connection's place for a request; what is open to all keeps none. Raises HttpError if too
        many run.
        """
        place: Place | None = scope.get("state", {}).get(PLACE)
        if place is None or scope["path"] in self._access.open_paths:
            return contextlib.nullcontext()
        return place.request()


def _correlation_id(given: str | None) -> str:
    """Return the caller's id, in place of one that logs and headers should not carry its digest, or where
    there is none one of our own.
    """
    return plain_id(given) if given else secrets.token_hex(8)
