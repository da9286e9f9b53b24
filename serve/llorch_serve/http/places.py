"""How many connections the HTTP front holds, from the moment each is accepted, and which one makes room for
another.

Input: the listening sockets' accepted ones, TLS handshakes included, and the guard's word on which
connections have a request that was let in. Output: at most so many open sockets. A new one always gets a
place, since requests may fill only a part of
them: the connection that has waited longest without a request makes room.
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
"""Requests that are let in at once; the other places are left to probes, and to whoever is still to show a
token.
"""

RECEIVE_BUFFER_BYTES: Final = 64 * 2**10
"""Of the kernel for each connection, which would otherwise grow to megabytes; no single read takes much more
either.
"""


class Place:
    """One connection's. number: its file descriptor. transport: set once the connection is made, after TLS'
    handshake.
    """

    def __init__(self, places: Places, connection: socket.socket) -> None:
        self._places = places
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

    def leave(self) -> None:
        """Cut the connection."""
        if self.transport is not None:
            self.transport.abort()
        else:
            with contextlib.suppress(OSError):  # it may have gone by itself
                self._socket.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Keep the place for as long as a request runs that was let in. Raises HttpError if too many run."""
        if self._places.serving >= MAX_REQUESTS:
            found = f"{MAX_REQUESTS} requests are under way, the most that are taken; try again"
            raise HttpError(503, "too_many_requests", found, (("Retry-After", "1"),))
        self._requests += 1
        self._places.serving += 1
        try:
            yield
        finally:
            self._requests -= 1
            self._places.serving -= 1
            self._places.last(self)


class Places:
    """All of them. Belongs to one event loop. ``serving``: requests that were let in and still run."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}  # by number, the one that waits longest first
        self.serving = 0

    def take(self, connection: socket.socket) -> None:
        """Give an accepted connection a place; where all are taken, another connection leaves."""
        if len(self._places) >= MAX_CONNECTIONS:
            self._places = {fd: place for fd, place in self._places.items() if place.open}
        if len(self._places) >= MAX_CONNECTIONS:
            self.make_room()
        self._places.pop(
            connection.fileno(), None
        )  # of one that has closed, else the number would not be free
        self._places[connection.fileno()] = Place(self, connection)

    def make_room(self) -> bool:
        """Cut the connection that has waited longest without a request; tell whether there was one."""
        for number, place in self._places.items():
            if place.open and not place.serving:
                del self._places[number]
                place.leave()
                return True
        return False

    def of(self, transport: asyncio.Transport) -> Place:
        """Return the place of a connection that is made."""
        place = self._places[transport.get_extra_info("socket").fileno()]
        place.transport = transport
        return place

    def last(self, place: Place) -> None:
        """Let a place be the last one that makes room, if it is still held."""
        if self._places.get(place.number) is place:
            self._places[place.number] = self._places.pop(place.number)


class Listener(socket.socket):
    """A listening socket whose connections take places."""

    def __init__(self, places: Places, family: int, kind: int, protocol: int) -> None:
        super().__init__(family, kind, protocol)
        self._places = places
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
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._places.make_room():
                raise BlockingIOError from error
            raise
        self._places.take(connection)
        return connection, address
