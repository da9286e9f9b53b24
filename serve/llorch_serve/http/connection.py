"""One connection of a client: how long the head of a request may take, and whose certificate it shows.

Input: uvicorn's own protocol for HTTP/1.1, which bounds how large a head may be and not how long it may take. Output: the same, with
the holder of a client certificate in the state of every request.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from llorch_serve.rpc.callers import holder_of

HEAD_TIMEOUT_S: Final = 30.0
"""From the connection, or from a request's first byte, to the last byte of its head."""

HOLDER: Final = "llorch.certificate_holder"
"""The key in a request's state; absent without a certificate."""


class Connection(H11Protocol):
    """uvicorn makes one for each connection."""

    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Begin to wait for a head."""
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        certificate = None if tls is None else tls.getpeercert(binary_form=True)
        if certificate:
            holder = holder_of(ssl.DER_cert_to_PEM_cert(certificate).encode())
            self.app_state = {**self.app_state, HOLDER: holder}
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Take what came, and wait on if it is part of a head."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait_for_head()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """End with the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        if self._head_due is None:
            self._head_due = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None
