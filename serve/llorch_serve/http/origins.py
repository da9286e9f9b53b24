"""Which web pages of elsewhere may call the worker from a browser: CORS, as the Fetch standard has it.

Input: the origins that the worker was told to allow, and a request's headers. Output: headers for its answer,
and the answer to what a browser asks before it sends a request. Without origins nothing is allowed, and
answers are as if this did not exist.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from llorch_serve.http.exchange import Exchange
from llorch_serve.http.problems import HttpError

Headers = tuple[tuple[bytes, bytes], ...]

ANY: Final = "*"
_METHODS: Final = b"GET, POST, DELETE, OPTIONS"
_EXPOSED: Final = b"X-Correlation-ID, X-Request-ID, Request-ID, Retry-After"
_REMEMBERED_S: Final = b"600"
_NAMES: Final = re.compile(r"[A-Za-z0-9_-]+( *, *[A-Za-z0-9_-]+)*")  # of headers
_MOST_NAMES_CHARS: Final = 2048
_PREFLIGHT: Final = "access-control-request-method"


@dataclass(frozen=True, slots=True)
class Origins:
    """The pages that may call. allowed: scheme, host and port each, or :data:`ANY`."""

    allowed: frozenset[str]

    def headers(self, origin: str | None) -> Headers:
        """Return what an answer to a page's request carries; None: no page has sent it."""
        if not self.allowed:
            return ()
        if ANY in self.allowed:
            return _shared(b"*")
        vary = ((b"vary", b"Origin"),)
        return vary if origin not in self.allowed else (*_shared(origin.encode("latin-1")), *vary)

    def allows(self, origin: str | None) -> bool:
        """Tell whether a page may call."""
        return origin is not None and (ANY in self.allowed or origin in self.allowed)

    def check_sender(self, headers: Mapping[str, str]) -> None:
        """Raise HttpError for a request of a page that may not call, of a kind that browsers send without
        asking first.
        """
        origin = headers.get("origin")
        own = (origin or "").partition("://")[2] == headers.get("host")  # the worker's own page
        if origin is not None and not own and not self.allows(origin):
            raise _not_allowed(origin)

    def preflight(self, exchange: Exchange) -> Headers | None:
        """Return the headers by which a browser learns what a page may send; None: it has not asked.

        Raises HttpError for a page that may not.
        """
        origin = exchange.header("origin")
        if exchange.method != "OPTIONS" or origin is None or exchange.header(_PREFLIGHT) is None:
            return None
        if not self.allows(origin):
            raise _not_allowed(origin)
        asked = exchange.header("access-control-request-headers") or ""
        plain = len(asked) <= _MOST_NAMES_CHARS and _NAMES.fullmatch(asked)
        found_headers: Headers = (
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", asked.encode() if plain else b"Authorization, Content-Type"),
            (b"access-control-max-age", _REMEMBERED_S),
        )
        if exchange.header("access-control-request-private-network") == "true":
            found_headers += ((b"access-control-allow-private-network", b"true"),)
        return found_headers


def _not_allowed(origin: str) -> HttpError:
    shown = origin[:100]
    found = (
        f"a page of {shown!r} may not call this worker; whoever runs it can allow it with "
        f"--allowed-origin {shown}"
    )
    return HttpError(403, "origin_not_allowed", found)


def _shared(origin: bytes) -> Headers:
    return (
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", _EXPOSED),
    )
