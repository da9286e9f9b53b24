"""What every HTTP request passes first: a correlation id, the bearer token, headers that bind browsers.

Input: uvicorn's events. Output: the same, with the correlation id in the scope and in the answer, or 401, or
403 for a page of another site that a browser was led to take for this worker's, or 503 where too many
requests run.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llorch_serve.calls.callers import TokenList, bearer_token, name_of_token
from llorch_serve.calls.correlation import plain_id
from llorch_serve.http.connection import HELD
from llorch_serve.http.connection_limit import HeldConnection
from llorch_serve.http.exchange import CALLER, CORRELATION, Exchange
from llorch_serve.http.origins import Headers, Origins
from llorch_serve.http.problems import HttpError, describe
from llorch_serve.http.shapes import refusal_body
from llorch_serve.observe.observer import Answered

_PORT: Final = re.compile(r":\d*$")
_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask for what.

    tokens: of which requests must carry one; None: none.
    open_paths: paths that need no token.
    hosts: names under which the worker may be addressed (the header Host, without its port); None: any. On
        the loopback a site whose name is made to point here would otherwise be let in by browsers as if it
        were this worker's own page.
    origins: pages of elsewhere that may call from a browser.
    """

    tokens: TokenList | None
    open_paths: frozenset[str]
    hosts: frozenset[str] | None
    origins: Origins

    def check_host(self, exchange: Exchange) -> None:
        """Raise HttpError unless the worker is addressed by a name of its own."""
        host = _PORT.sub("", exchange.header("host") or "").lower()
        if self.hosts is not None and host not in self.hosts:
            known, shown = ", ".join(sorted(self.hosts)), host[:100]
            found = (
                f"Host is {shown!r}, expected one of {known}; whoever runs the worker can allow it with "
                f"--allowed-host {shown}"
            )
            raise HttpError(403, "unknown_host", found)

    def admit(self, exchange: Exchange, path: str) -> str:
        """Return who asks, empty where that cannot be told. Raises HttpError for what is refused."""
        if self.tokens is None:
            return exchange.holder
        shown = (bearer_token(exchange.header("authorization")), exchange.header("x-api-key"))
        names = (_token_name(self.tokens, token) for token in shown)
        caller = next((name for name in names if name is not None), None)
        if caller is None and path not in self.open_paths:
            found = (
                "no token, or a wrong one; send the header Authorization: Bearer TOKEN, or x-api-key: TOKEN"
            )
            raise HttpError(401, "invalid_api_key", found, (("WWW-Authenticate", "Bearer"),))
        return exchange.holder or caller or ""


def _token_name(tokens: TokenList, token: str | None) -> str | None:
    """Return a name for whoever a token belongs to; None: nobody's."""
    shown = None if token is None else token.encode("latin-1", "replace")
    return name_of_token(shown) if shown is not None and tokens.accepts(shown) else None


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
        named = (
            (b"x-correlation-id", correlation_id.encode()),
            (b"x-request-id", correlation_id.encode()),
            (b"request-id", correlation_id.encode()),
        )
        shared = self._shared(exchange.header("origin"))

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *named, *_HEADERS, *shared]
            await send(message)

        try:
            self._access.check_host(exchange)
            if (preflight := self._access.origins.preflight(exchange)) is not None:
                await answer({"type": "http.response.start", "status": 204, "headers": [*preflight]})
                await answer({"type": "http.response.body", "body": b""})
                return
            scope[CALLER] = self._access.admit(exchange, scope["path"])
            with self._kept(scope):
                await self._app(scope, receive, answer)
        except HttpError as error:
            problem = describe(error, route="")
            await Exchange(scope, receive, answer).send_problem(problem, refusal_body(problem, scope["path"]))
        finally:
            seconds = time.perf_counter() - begun
            self._on_answered(Answered(scope["method"], scope["path"], status, seconds, correlation_id))

    def _shared(self, origin: str | None) -> Headers:
        """Return the headers that say to which pages a browser shows the answer."""
        policy = b"cross-origin" if self._access.origins.allows(origin) else b"same-origin"
        return ((b"cross-origin-resource-policy", policy), *self._access.origins.headers(origin))

    def _kept(self, scope: Scope) -> contextlib.AbstractContextManager[None]:
        """Keep the connection for a request; what is open to all keeps none. Raises HttpError if too many
        run.
        """
        held: HeldConnection | None = scope.get("state", {}).get(HELD)
        if held is None or scope["path"] in self._access.open_paths:
            return contextlib.nullcontext()
        return held.request()


def _correlation_id(given: str | None) -> str:
    """Return the caller's id, in place of one that logs and headers should not carry its digest, or where
    there is none one of our own.
    """
    return plain_id(given) if given else secrets.token_hex(8)
