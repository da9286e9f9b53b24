"""How many connections the HTTP front holds, from the moment each is accepted, and which one is
closed for another.

Input: the listening sockets' accepted ones, TLS handshakes included, and the guard's word on which
connections have a request that was let in. Output: at most so many open sockets. A new connection is always
accepted, since requests may hold only a part of them: the one that has waited longest without a request is
cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Final

from llorch_serve.http.problems import HttpError

MAX_CONNECTIONS: Final = 1024
MAX_REQUESTS: Final = 896
"""Requests that are let in at once. The other connections are left to probes, and to whoever is still to show
a token.
"""

RECEIVE_BUFFER_BYTES: Final = 64 * 2**10
"""Of the kernel for each connection, which would otherwise grow to megabytes; no single read takes much more
either.
"""


class HeldConnection:
    """One accepted connection. number: its file descriptor. transport: set once the connection is made, after
    TLS' handshake.
    """

    def __init__(self, limit: ConnectionLimit, connection: socket.socket) -> None:
        self._limit = limit
        self._socket = connection
        self.number = connection.fileno()
        self.transport: asyncio.Transport | None = None
        self._requests = 0

    @property
    def serving(self) -> bool:
        """Whether it has a request that was let in; two for a moment, where one comes close behind another
        that has been answered.
        """
        return self._requests > 0

    @property
    def open(self) -> bool:
        """Whether the socket is."""
        return self._socket.fileno() >= 0

    def cut(self) -> None:
        """Cut the connection."""
        if self.transport is not None:
            self.transport.abort()
        else:
            with contextlib.suppress(OSError):  # it may have gone by itself
                self._socket.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Keep the connection for as long as a request runs that was let in.

        Raises HttpError if too many run.
        """
        if self._limit.serving >= MAX_REQUESTS:
            found = f"{MAX_REQUESTS} requests are under way, the most that are taken; try again"
            raise HttpError(503, "too_many_requests", found, (("Retry-After", "1"),))
        self._requests += 1
        self._limit.serving += 1
        try:
            yield
        finally:
            self._requests -= 1
            self._limit.serving -= 1
            self._limit.renew(self)


class ConnectionLimit:
    """All connections of a front. Belongs to one event loop.

    serving: requests that were let in and still run.
    """

    def __init__(self) -> None:
        self._held: dict[int, HeldConnection] = {}  # by number, the one that waits longest first
        self.serving = 0

    def hold(self, connection: socket.socket) -> None:
        """Count an accepted connection; where the limit is reached, another one is cut."""
        if len(self._held) >= MAX_CONNECTIONS:
            self._held = {number: held for number, held in self._held.items() if held.open}
        if len(self._held) >= MAX_CONNECTIONS:
            self.cut_one()
        # One that has closed may have had the number, which would else not be free.
        self._held.pop(connection.fileno(), None)
        self._held[connection.fileno()] = HeldConnection(self, connection)

    def cut_one(self) -> bool:
        """Cut the connection that has waited longest without a request; tell whether there was one."""
        for number, held in self._held.items():
            if held.open and not held.serving:
                del self._held[number]
                held.cut()
                return True
        return False

    def of(self, transport: asyncio.Transport) -> HeldConnection:
        """Return the connection that a transport was made of."""
        held = self._held[transport.get_extra_info("socket").fileno()]
        held.transport = transport
        return held

    def renew(self, held: HeldConnection) -> None:
        """Let a connection be the last one to be cut, if it is still held."""
        if self._held.get(held.number) is held:
            self._held[held.number] = self._held.pop(held.number)


class Listener(socket.socket):
    """A listening socket whose connections count against a limit."""

    def __init__(self, limit: ConnectionLimit, family: int, kind: int, protocol: int) -> None:
        super().__init__(family, kind, protocol)
        self._limit = limit
        self.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES
        )  # which connections inherit

    def accept(self) -> tuple[socket.socket, object]:
        """Accept a connection, as the event loop does.

        Raises BlockingIOError if the process may open no further file: the loop asks again, once a connection
        has left.
        """
        try:
            connection, address = super().accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._limit.cut_one():
                raise BlockingIOError from error
            raise
        self._limit.hold(connection)
        return connection, address
