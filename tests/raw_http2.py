"""HTTP/2 by hand: what no gRPC library would send, and sockets that behave as none of its connections would."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

from google.protobuf.message import Message

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
END_STREAM, END_HEADERS = 1, 4
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


@contextlib.contextmanager
def connected(address: str, timeout_s: float) -> Iterator[socket.socket]:
    """A plain TCP connection to HOST:PORT."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout_s) as connection:
        yield connection


def ends(connection: socket.socket) -> bool:
    """Read what comes; tell whether the other side closes before the connection's timeout."""
    with contextlib.suppress(ConnectionError):
        try:
            while connection.recv(2**16):
                pass
        except TimeoutError:
            return False
    return True
