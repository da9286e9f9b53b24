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

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send one message. Raises OSError if the other end is gone."""
        whole = sum(memoryview(part).nbytes for part in parts)
        self._socket.sendall(b"".join((_LENGTH.pack(whole), *parts)))

    def receive(self) -> memoryview | None:
        """Return the next message, valid until the one after it; None once the other end is gone.

        Raises ValueError for a length that no message has.
        """
        head = self._fill(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE:
            raise ValueError(f"a message of {length} bytes; expected at most {MAX_MESSAGE}")
        return self._fill(length)

    def close(self) -> None:
        """Close this end; whoever waits at either end learns of it."""
        with contextlib.suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _fill(self, count: int) -> memoryview | None:
        if count > len(self._buffer):
            self._buffer = bytearray(count)
        view, have = memoryview(self._buffer)[:count], 0
        while have < count:
            try:
                found = self._socket.recv_into(view[have:])
            except OSError:  # closed at this end, or broken
                return None
            if not found:
                return None
            have += found
        return view
