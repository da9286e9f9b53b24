"""One connection of a client: how long each part of its life may take, and whose certificate it shows.

Input: uvicorn's own protocol for HTTP/1.1, which bounds how large a head may be, and how long a connection
may be silent between requests. Output: the same, looked at every second from its first to its last, so that
nothing a client leaves undone lasts: a head, the rest of a body that was answered before its end, an answer
that is not read, a farewell. A body that is read has its time in ``exchange.py``. What arrives is parsed on
the event loop that answers everybody, so its lines and chunks are counted: each takes ten microseconds,
however short it is. The holder of a client certificate, and the held connection, are in the state of every
request.
"""

from __future__ import annotations

import asyncio
import enum
import re
import ssl
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from llorch_serve.calls.callers import name_of_certificate
from llorch_serve.http.connection_limit import ConnectionLimit

LOOK_S: Final = 1.0
HEAD_TIMEOUT_S: Final = 30.0
"""From the connection, or from a request's first byte, to the last byte of its head."""
IDLE_TIMEOUT_S: Final = 60.0
"""Between two requests."""
REST_TIMEOUT_S: Final = 5.0
"""From an answer to the end of a body that it did not wait for."""
WRITE_TIMEOUT_S: Final = 60.0
"""In which a client must take some of an answer that it has not read."""
FAREWELL_TIMEOUT_S: Final = 10.0
"""For the last bytes, TLS' own included, to leave."""

MAX_HEAD_LINES: Final = 256
MAX_CHUNKS: Final = 1024
"""Of a body, unless they have MIN_CHUNK_BYTES on average."""
MIN_CHUNK_BYTES: Final = 64

_PIECE_BYTES: Final = 4096  # parsed before it is looked whether a head is too large
_HEAD_END: Final = re.compile(rb"\n\r?\n")

HOLDER: Final = "llorch.certificate_holder"
"""The key in a request's state; absent without a certificate."""
HELD: Final = "llorch.held_connection"
"""The key in a request's state."""


class _Phase(enum.Enum):
    HEAD = enum.auto()
    ANSWER = enum.auto()  # as long as it takes: the application bounds what it waits for
    UNREAD = enum.auto()  # an answer that waits until the client reads
    REST = enum.auto()
    IDLE = enum.auto()
    FAREWELL = enum.auto()


class _Client(h11.Connection):
    """h11's side of a connection, with heads of bounded lines and bodies of bounded chunks. max_head_bytes:
    of a head that is not whole.
    """

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._chunks = self._chunk_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return what comes next. Raises h11.RemoteProtocolError."""
        if self.their_state is h11.IDLE:
            self._chunks = self._chunk_bytes = 0
            head, _ = self.trailing_data
            end = _HEAD_END.search(head)
            if head.count(b"\n", 0, end.start() if end else len(head)) > MAX_HEAD_LINES:
                raise h11.RemoteProtocolError(f"a head has more than {MAX_HEAD_LINES} lines")
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._chunk_bytes += len(event.data)
            if self._chunks > MAX_CHUNKS and self._chunk_bytes < MIN_CHUNK_BYTES * self._chunks:
                raise h11.RemoteProtocolError(f"a body has more than {MAX_CHUNKS} tiny chunks")
        return event


class Connection(H11Protocol):
    """uvicorn makes one for each connection. limit: the front's."""

    def __init__(self, *args: Any, limit: ConnectionLimit, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Client(self.config.h11_max_incomplete_event_size or 0)
        self._limit = limit
        self._reads = 0  # how often the client has made room for more of an answer
        self._seen: tuple[object, ...] = ()
        self._since = 0.0
        self._next_look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Begin to look."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, HELD: self._limit.of(transport)}
        tls = transport.get_extra_info("ssl_object")
        certificate = None if tls is None else tls.getpeercert(binary_form=True)
        if certificate:
            holder = name_of_certificate(ssl.DER_cert_to_PEM_cert(certificate).encode())
            self.app_state[HOLDER] = holder
        self._look()

    def data_received(self, data: bytes) -> None:
        """Parse what has come, until it is refused."""
        for at in range(0, len(data), _PIECE_BYTES):
            if self.transport.is_closing():
                return
            super().data_received(data[at : at + _PIECE_BYTES])

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; where an answer has begun or ended already, by closing alone."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def resume_writing(self) -> None:
        """Note that the client reads."""
        self._reads += 1
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """End with the connection."""
        if self._next_look is not None:
            self._next_look.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        phase, now = self._phase(), self.loop.time()
        seen = (phase, self.cycle, self._reads)
        if seen != self._seen:
            self._seen, self._since = seen, now
        limit_s = _limit_s(phase)
        if limit_s is not None and now - self._since >= limit_s:
            if phase in (_Phase.UNREAD, _Phase.FAREWELL):
                self.transport.abort()  # closing would wait for what is not read
            else:
                self.transport.close()
        self._next_look = self.loop.call_later(LOOK_S, self._look)

    def _phase(self) -> _Phase:
        if self.transport.is_closing():
            return _Phase.FAREWELL
        if self.flow.write_paused:
            return _Phase.UNREAD
        cycle: RequestResponseCycle | None = self.cycle  # none before the first request
        if cycle is not None and not cycle.response_complete:
            return _Phase.ANSWER
        if self.conn.their_state is not h11.IDLE:
            return _Phase.REST
        head_has_begun = cycle is None or self.conn.trailing_data[0]
        return _Phase.HEAD if head_has_begun else _Phase.IDLE


def _limit_s(phase: _Phase) -> float | None:
    limits = {
        _Phase.HEAD: HEAD_TIMEOUT_S,
        _Phase.UNREAD: WRITE_TIMEOUT_S,
        _Phase.REST: REST_TIMEOUT_S,
        _Phase.IDLE: IDLE_TIMEOUT_S,
        _Phase.FAREWELL: FAREWELL_TIMEOUT_S,
    }
    return limits.get(phase)
