"""One JSON document to one URL over HTTP or HTTPS: the status that came back, within a time limit that covers all of it.

The standard library's client on a daemon thread: it needs no event loop, and a manager that answers byte by byte can
hold up neither the worker nor its end.
"""

from __future__ import annotations

import asyncio
import http.client
import ssl
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from urllib.parse import urlsplit

from llorch_serve.errors import UsageError


@dataclass(frozen=True, slots=True)
class CallbackUrl:
    """Where a manager listens. target: path and query, as they are sent."""

    secure: bool
    host: str
    port: int | None
    target: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{'https' if self.secure else 'http'}://{host}{port}{self.target.partition('?')[0]}"


def read_url(value: str) -> CallbackUrl:
    """Return the parts of a URL. Raises UsageError for one that nothing can be posted to."""
    expected = "expected one like http://manager:8080/workers or https://..."
    try:
        parts = urlsplit(value)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"--callback-url cannot be read ({error}); {expected}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(f"--callback-url is {value!r}; {expected}")
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise UsageError(f"--callback-url names a host that cannot be ({error}); {expected}") from error
    if parts.username is not None:
        raise UsageError("--callback-url holds a user name, which this worker does not send; leave it out")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not target.isascii() or any(c.isspace() for c in target):
        raise UsageError(f"--callback-url is {value!r}, with characters that must be percent-encoded")
    return CallbackUrl(parts.scheme == "https", host, port, target)


async def post(url: CallbackUrl, body: bytes, *, timeout_s: float) -> int:
    """Send ``body``; return the answer's HTTP status. Raises OSError, TimeoutError among others, or HTTPException."""
    result: Future[int] = Future()
    result.set_running_or_notify_cancel()  # from here on a caller that gives up cannot take it from the thread

    def run() -> None:
        try:
            result.set_result(_post(url, body, timeout_s))
        except (OSError, http.client.HTTPException) as error:
            result.set_exception(error)

    threading.Thread(target=run, name="llorch-callback", daemon=True).start()
    return await asyncio.wait_for(asyncio.wrap_future(result), timeout_s)


def _post(url: CallbackUrl, body: bytes, timeout_s: float) -> int:
    connection: http.client.HTTPConnection
    if url.secure:
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(url.host, url.port, timeout=timeout_s, context=context)
    else:
        connection = http.client.HTTPConnection(url.host, url.port, timeout=timeout_s)
    try:
        connection.request(
            "POST", url.target, body, {"Content-Type": "application/json", "Connection": "close"}
        )
        return connection.getresponse().status
    finally:
        connection.close()
