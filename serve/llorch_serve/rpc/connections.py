"""Cutting a client's connection, for a client that takes nothing of what it is sent.

gRPC for asyncio can end a call with a status, but a status waits behind what the client has not taken, and
nothing there cancels a call from the server's side. The system can: shutting a socket down ends the
connection and every call on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import urllib.parse
from pathlib import Path
from typing import Final

PAUSE_S: Final = 0.25
"""Between two looks at this process's sockets, each of which takes milliseconds where there are a
thousand.
"""

_DESCRIPTORS: Final = Path("/dev/fd")  # Linux and macOS


class Connections:
    """The connections of this process, on one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._unwanted: set[tuple[str, int]] = set()

    def cut(self, peer: str) -> None:
        """Shut down the connection with ``peer``, given as gRPC does (ipv4:HOST:PORT, ipv6:[HOST]:PORT),
        within PAUSE_S.

        On Windows, which does not list a process's sockets, it stays.
        """
        address = _address(peer)
        if address is None:
            return
        if not self._unwanted:
            self._loop.call_later(PAUSE_S, self._cut_all)
        self._unwanted.add(address)

    def _cut_all(self) -> None:
        unwanted, self._unwanted = self._unwanted, set()
        for entry in _DESCRIPTORS.iterdir() if _DESCRIPTORS.is_dir() else ():
            # A descriptor of our own, so that the one looked at is the one shut down, whatever other threads
            # close and open meanwhile.
            with contextlib.suppress(OSError), _opened(int(entry.name)) as connection:
                if _other_end(connection) in unwanted:
                    connection.shutdown(socket.SHUT_RDWR)


def _opened(descriptor: int) -> socket.socket:
    """Return a socket's own duplicate. Raises OSError for what is no socket."""
    number = os.dup(descriptor)
    try:
        return socket.socket(fileno=number)
    except OSError:
        os.close(number)
        raise


def _other_end(connection: socket.socket) -> tuple[str, int] | None:
    """Return host and port; None for a socket of another family. Raises OSError where there is no other
    end.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    host, port = connection.getpeername()[:2]
    return host.removeprefix(
        "::ffff:"
    ), port  # gRPC listens for both families at once, and tells of IPv4 as such


def _address(peer: str) -> tuple[str, int] | None:
    """Return host and port; None for a connection that has none: one gone already, or of another family."""
    family, _, address = urllib.parse.unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return host.strip("[]").removeprefix("::ffff:"), int(port)
