"""Messages on a socket: the length in eight bytes, then the message."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from typing import Final

_LENGTH: Final = struct.Struct("<Q")
MAX_MESSAGE: Final = 2**33
"""Bytes; the logits of 16,000 rows over a vocabulary of 128,000 fit in it."""


class Messages:
    """One end of a connected pair of sockets. Sending and receiving on one thread each."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray(2**16)
        self._have = self._taken = 0  # bytes in it, and those of the message that was returned last

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send one message. Raises OSError if the other end is gone."""
        whole = sum(memoryview(part).nbytes for part in parts)
        self._socket.sendall(b"".join((_LENGTH.pack(whole), *parts)))

    def receive(self) -> memoryview | None:
        """Return the next message, valid until the one after it; None once the other end is gone.

        Raises ValueError for a length that no message has.
        """
        self._begin_anew()
        if not self._have_at_least(_LENGTH.size):
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_MESSAGE:
            raise ValueError(f"a message of {length} bytes; expected at most {MAX_MESSAGE}")
        self._taken = _LENGTH.size + length
        return (
            memoryview(self._buffer)[_LENGTH.size : self._taken] if self._have_at_least(self._taken) else None
        )

    def close(self) -> None:
        """Close this end; whoever waits at either end learns of it."""
        with contextlib.suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _begin_anew(self) -> None:
        """Forget the last message. What has come behind it goes to the front."""
        rest = self._have - self._taken
        if rest:
            self._buffer[:rest] = self._buffer[self._taken : self._have]
        self._have, self._taken = rest, 0

    def _have_at_least(self, count: int) -> bool:
        """Wait for so many bytes of a message, and take more where they are there: most come in one piece."""
        if count > len(self._buffer):
            self._buffer = self._buffer[: self._have] + bytearray(count - self._have)
        view = memoryview(self._buffer)
        while self._have < count:
            try:
                found = self._socket.recv_into(view[self._have :])
            except OSError:  # closed at this end, or broken
                return False
            if not found:
                return False
            self._have += found
        return True
