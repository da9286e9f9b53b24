"""One JSON document to one URL over HTTP or HTTPS: the status that came back, within a time limit that covers
all of it.

The standard library's client on a daemon thread: it needs no event loop, and a manager that answers byte by
byte can hold up neither the worker nor its end. When the time is over the connection is ended from outside,
and with it the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
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


class Poster:
    """Posts to one URL, one document at a time; belongs to one event loop.

    A thread that is given up is woken by the end of its connection. One that still looks the host's address
    up cannot be
    woken: no other is started beside it.
    """

    def __init__(self, url: CallbackUrl) -> None:
        self._url = url
        self._under_way: _Attempt | None = None

    async def post(self, body: bytes, *, timeout_s: float) -> int:
        """Send ``body``; return the answer's HTTP status. Raises OSError, TimeoutError among others, or
        HTTPException.
        """
        async with asyncio.timeout(timeout_s):
            if self._under_way is not None:
                await asyncio.wait((asyncio.wrap_future(self._under_way.ended),))
            attempt = self._under_way = _Attempt(self._url, body, timeout_s)
            threading.Thread(target=attempt.run, name="llorch-callback", daemon=True).start()
            try:
                return await asyncio.wrap_future(attempt.status)
            finally:
                attempt.give_up()


class _Attempt:
    """One exchange with the manager, on a thread of its own. status: its result; ended: the thread needs
    nothing more.
    """

    def __init__(self, url: CallbackUrl, body: bytes, timeout_s: float) -> None:
        self._url = url
        self._body = body
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._given_up = False
        self._socket: socket.socket | None = None
        self.status: Future[int] = Future()
        # from here on a caller that gives up cannot take it from the thread
        self.status.set_running_or_notify_cancel()
        self.ended: Future[None] = Future()

    def run(self) -> None:
        """Do it."""
        try:
            self.status.set_result(self._exchange())
        except (OSError, http.client.HTTPException) as error:
            self.status.set_exception(error)
        finally:
            self.ended.set_result(None)

    def give_up(self) -> None:
        """End the connection, and with it whatever waits for it, however slowly the manager still sends. Any
        thread.
        """
        with self._lock:
            self._given_up = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # it has ended by itself
                    socket.socket.shutdown(
                        self._socket, socket.SHUT_RDWR
                    )  # a TLS socket's own would change its state

    def _exchange(self) -> int:
        connection: http.client.HTTPConnection
        if self._url.secure:
            connection = http.client.HTTPSConnection(self._url.host, self._url.port)
        else:
            connection = http.client.HTTPConnection(self._url.host, self._url.port)
        try:
            connection.sock = self._connected(connection.port)
            headers = {"Content-Type": "application/json", "Connection": "close"}
            connection.request("POST", self._url.target, self._body, headers)
            return connection.getresponse().status
        finally:
            with self._lock:
                self._socket = None
            connection.close()

    def _connected(self, port: int) -> socket.socket:
        failure: OSError = OSError(f"{self._url.host} has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(
            self._url.host, port, type=socket.SOCK_STREAM
        ):
            made = socket.socket(family, kind, protocol)
            try:
                self._hold(made)
                made.connect(address)
                if not self._url.secure:
                    return made
                context = ssl.create_default_context()
                made = context.wrap_socket(
                    made, server_hostname=self._url.host, do_handshake_on_connect=False
                )
                self._hold(made)
                made.do_handshake()
                return made
            except OSError as error:
                made.close()
                failure = error
        raise failure

    def _hold(self, made: socket.socket) -> None:
        """Let ``give_up`` know a socket before anything waits for it. Raises TimeoutError if it has been
        called.
        """
        made.settimeout(self._timeout_s)
        with self._lock:
            if self._given_up:
                raise TimeoutError("given up")
            self._socket = made
