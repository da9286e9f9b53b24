"""How a client reaches a worker: plain or TLS, with a certificate of its own or a bearer token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import grpc

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.rpc import MAX_MESSAGE_BYTES

OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A worker that is still starting is found soon after it listens.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A machine that is gone without a word is noticed, if late: to servers more pings are an attack.
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclass(frozen=True, slots=True)
class Access:
    """What a client shows and whom it trusts.

    token: sent with every call. tls: encrypt. ca: PEM of whoever signed the worker's certificate; None:
        gRPC's own list.
    chain, key: PEM of the client's own certificate, where the worker asks for one.
    """

    token: str | None = field(default=None, repr=False)
    tls: bool = False
    ca: bytes | None = None
    chain: bytes | None = None
    key: bytes | None = field(default=None, repr=False)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return the channel's credentials; None without TLS."""
        if not self.tls:
            return None
        return grpc.ssl_channel_credentials(self.ca, self.key, self.chain)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what every call carries."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)


PLAIN: Final = Access()
"""Plain text, no token."""


def check_size(size: int) -> None:
    """Raise InvalidRequestError for a message of so many bytes that no worker takes it."""
    if size > MAX_MESSAGE_BYTES:
        found = f"has {size} bytes, a worker takes at most {MAX_MESSAGE_BYTES}; send less text"
        raise InvalidRequestError([FieldViolation("request", found)])
