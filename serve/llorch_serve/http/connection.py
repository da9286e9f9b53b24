"""One connection of a client: how long each part of its life may take, and whose certificate it shows.

Input: uvicorn's own protocol for HTTP/1.1, which bounds how large a head may be, and how long a connection may be silent between
requests. Output: the same, looked at every second from its first to its last, so that nothing a client leaves undone lasts: a head,
the rest of a body that was answered before its end, an answer that is not read, a farewell. A body that is read has its time in
``exchange.py``. The holder of a client certificate, and the connection's place, are in the state of every request.
"""

from __future__ import annotations

import asyncio
import enum
import ssl
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from llorch_serve.http.places import Places
from llorch_serve.rpc.callers import holder_of

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

HOLDER: Final = "llorch.certificate_holder"
"""The key in a request's state; absent without a certificate."""
PLACE: Final = "llorch.place"
"""The key in a request's state."""


class _Phase(enum.Enum):
    HEAD = enum.auto()
    ANSWER = enum.auto()  # as long as it takes: the application bounds what it waits for
    UNREAD = enum.auto()  # an answer that waits until the client reads
    REST = enum.auto()
    IDLE = enum.auto()
    FAREWELL = enum.auto()


class Connection(H11Protocol):
    """uvicorn makes one for each connection. places: those of the front."""

    def __init__(self, *args: Any, places: Places, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places = places
        self._reads = 0  # how often the client has made room for more of an answer
        self._seen: tuple[object, ...] = ()
        self._since = 0.0
        self._next_look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Begin to look."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, PLACE: self._places.of(transport)}
        tls = transport.get_extra_info("ssl_object")
        certificate = None if tls is None else tls.getpeercert(binary_form=True)
        if certificate:
            holder = holder_of(ssl.DER_cert_to_PEM_cert(certificate).encode())
            self.app_state[HOLDER] = holder
        self._look()

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
