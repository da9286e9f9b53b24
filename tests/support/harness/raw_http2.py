"""HTTP/2 by hand: what no gRPC library would send, and sockets that behave as none of its connections
would.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterable, Iterator

from google.protobuf.message import Message

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4
ACK = 1
INITIAL_WINDOW_SIZE = 4


def frame(
    kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"", *, length: int | None = None
) -> bytes:
    """Return a frame; ``length`` is what it claims to have, if not the truth."""
    size = len(payload) if length is None else length
    return size.to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def settings(values: dict[int, int] | None = None) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", *pair) for pair in (values or {}).items()))


def headers(path: str, stream: int = 1) -> bytes:
    """Return a call's HEADERS frame; every field is a literal of less than 127 bytes."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(
        b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    return frame(HEADERS, END_HEADERS, stream, block)


def call(path: str, message: Message, stream: int = 1, *, whole: bool = True) -> bytes:
    """Return a call with its message; not ``whole``: as if another message were to come."""
    body = message.SerializeToString()
    prefixed = b"\x00" + len(body).to_bytes(4, "big") + body
    return headers(path, stream) + frame(DATA, END_STREAM if whole else 0, stream, prefixed)


def begun(path: str, size: int, stream: int = 1, *, sent: bytes = b"") -> bytes:
    """Return the beginning of a call: its HEADERS, what its message claims to have, and the message's first
    bytes.
    """
    return headers(path, stream) + frame(DATA, 0, stream, b"\x00" + size.to_bytes(4, "big") + sent)


@contextlib.contextmanager
def connected(address: str, timeout_s: float) -> Iterator[socket.socket]:
    """A plain TCP connection to HOST:PORT."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout_s) as connection:
        yield connection


class Streams:
    """Calls of one connection whose streamed answers are read and nothing more: the least that a client can
    do.

    What they send is not looked at but for where a message begins; a call without DATA before its end has
    failed.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb")
        wide = frame(WINDOW_UPDATE, payload=struct.pack(">I", 2**30))
        connection.sendall(PREFACE + settings({INITIAL_WINDOW_SIZE: 2**30}) + wide)
        self._next = 1

    def messages(self, path: str, requests: Iterable[Message]) -> list[list[bytes]]:
        """Make the calls together; return the messages of each once all have ended."""
        streams = range(self._next, self._next + 2 * len(found := [*requests]), 2)
        self._next = streams.stop
        data: dict[int, list[bytes]] = {stream: [] for stream in streams}
        self._connection.sendall(
            b"".join(call(path, request, stream) for request, stream in zip(found, streams, strict=True))
        )
        left = set(streams)
        while left:
            kind, flags, stream, payload = self._frame()
            if kind == DATA:
                data[stream].append(payload)
            elif kind in (SETTINGS, PING) and not flags & ACK:
                answer = payload if kind == PING else b""
                self._connection.sendall(frame(kind, ACK, payload=answer))
            elif kind in (RST_STREAM, GOAWAY):
                raise RuntimeError(f"a frame of kind {kind} with {payload.hex()} ended a call")
            if kind in (DATA, HEADERS) and flags & END_STREAM:
                left.discard(stream)
        return [_messages(b"".join(data[stream])) for stream in streams]

    def _frame(self) -> tuple[int, int, int, bytes]:
        head = self._file.read(9)
        if len(head) < 9:
            raise RuntimeError("the connection was closed")
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        return kind, flags, stream, self._file.read(int.from_bytes(head[:3], "big"))


def _messages(data: bytes) -> list[bytes]:
    """Return the gRPC messages of a call's DATA."""
    found = []
    while data:
        size = int.from_bytes(data[1:5], "big")
        found.append(data[5 : 5 + size])
        data = data[5 + size :]
    return found


def ended(connection: socket.socket, streams: Iterable[int]) -> bool:
    """Read what comes until all these calls have ended; tell whether the connection is still open then.

    Keeps what a peer must: settings and pings are acknowledged.
    """
    left, file = set(streams), connection.makefile("rb")
    with contextlib.suppress(ConnectionError):
        while left and len(head := file.read(9)) == 9:
            kind, flags, stream = struct.unpack(">BBI", head[3:])
            payload = file.read(int.from_bytes(head[:3], "big"))
            if kind in (SETTINGS, PING) and not flags & ACK:
                connection.sendall(frame(kind, ACK, payload=payload if kind == PING else b""))
            if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
                left.discard(stream)
    return not left


def ends(connection: socket.socket) -> bool:
    """Read what comes; tell whether the other side closes before the connection's timeout."""
    with contextlib.suppress(ConnectionError):
        try:
            while connection.recv(2**16):
                pass
        except TimeoutError:
            return False
    return True
