"""A worker's listening server: bind, ready, drain, fail, close.

Input: an address, and a generator once it is loaded. Output: GenerationService, grpc.health.v1 and reflection
on that address. In what order its methods are called is the business of ``lifecycle/serving.py``.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from dataclasses import dataclass
from typing import Final

import grpc

from llorch_serve.calls.front_desk import FrontDesk
from llorch_serve.calls.live import MAX_LIVE_CALLS
from llorch_serve.engine.load import Load, WorkerState
from llorch_serve.errors import EngineStoppedError, PortError
from llorch_serve.loading.progress import LoadProgress
from llorch_serve.requests import TextGenerator
from llorch_serve.rpc import MAX_MESSAGE_BYTES, SERVICE_NAME, health, reflection
from llorch_serve.rpc.security import OPEN, Security, TokenCheck
from llorch_serve.rpc.sending import Sending
from llorch_serve.rpc.servicer import GenerationServicer
from llorch_serve.rpc.worker_status import WorkerStatus

DEFAULT_PORT: Final = 50051
MAX_CONNECTIONS: Final = 1024
MAX_PORT: Final = 65_535
_MAX_PENDING_CALLS: Final = 8_192  # that have arrived and wait for the event loop
_MAX_STREAMS: Final = MAX_LIVE_CALLS + 64  # of one connection: a manager's only one, for health and load too
_LOOKAHEAD_BYTES: Final = 2**16
_LAST_CALLS_S: Final = 0.2  # for calls that have arrived and not begun to be refused, rather than cut
MAX_PENDING_BYTES: Final = 256 * 2**20  # of messages that wait to be read
_LOADING: Final = "the worker is loading its model; try again when its health service says SERVING"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How a worker listens.

    host, port: loopback by default; port 0 takes any free one.
    drain_timeout_s: how long running calls may go on after a signal to stop, in seconds.
    max_message_bytes: largest message taken or sent, see MAX_MESSAGE_BYTES.
    idle_timeout_s: a worker without a call for so long stops as if it were told to; None: never.
    security: what it asks of its callers.
    stream_interval: tokens of an answer that one message of its stream waits for; None: as the load asks for.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    drain_timeout_s: float = 30.0
    max_message_bytes: int = MAX_MESSAGE_BYTES
    idle_timeout_s: float | None = None
    security: Security = OPEN
    stream_interval: int | None = None


class WorkerServer:
    """A listening server. Made and used on one event loop; :meth:`bind` comes first, :meth:`close` last."""

    def __init__(self, config: ServerConfig, progress: LoadProgress | None = None) -> None:
        self._config = config
        self._status = WorkerStatus(progress or LoadProgress())
        self._desk = FrontDesk(
            "llorch-request",
            _LOADING,
            max_pending_bytes=MAX_PENDING_BYTES,
            stream_interval=config.stream_interval,
        )
        tokens, sending = config.security.tokens, Sending()
        self._server = grpc.aio.server(
            options=_options(config), interceptors=(TokenCheck(tokens, sending),) if tokens else ()
        )
        self._servicer = GenerationServicer(
            self._desk,
            self._status.load,
            max_message_bytes=config.max_message_bytes,
            by_token=bool(tokens),
        )
        self._health = health.Health(("", SERVICE_NAME), sending)
        self._reflection = reflection.Reflection((SERVICE_NAME, health.NAME, reflection.NAME), sending)

    @property
    def drain_timeout_s(self) -> float:
        """How long running calls may go on after a signal to stop, in seconds."""
        return self._config.drain_timeout_s

    @property
    def idle_timeout_s(self) -> float | None:
        """How long a worker without a call goes on, in seconds; None: for good."""
        return self._config.idle_timeout_s

    def load(self) -> Load:
        """Return the worker's state, how far it has loaded and how busy it is."""
        return self._status.load()

    async def wait_unused(self) -> None:
        """Return once no call has run for the idle timeout; never if there is none."""
        if self._config.idle_timeout_s is None:
            await asyncio.Event().wait()
        else:
            await self._desk.wait_unused(self._config.idle_timeout_s)

    async def bind(self) -> str:
        """Listen, answer health checks with NOT_SERVING and calls with UNAVAILABLE; return HOST:PORT.

        Raises PortError if the address cannot be bound.
        """
        for name, service in (
            (SERVICE_NAME, self._servicer),
            (health.NAME, self._health),
            (reflection.NAME, self._reflection),
        ):
            handlers = service.method_handlers()
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        # Where gRPC supports it, health waits for the event loop in queues of its own, which floods of other
        # calls do not fill.
        self._server.add_registered_method_handlers(health.NAME, self._health.method_handlers())
        address = _bind(self._server, self._config)
        await self._server.start()
        return address

    async def set_ready(self, generator: TextGenerator) -> None:
        """Serve calls with ``generator`` and turn SERVING."""
        self._desk.open(generator)
        self._status.set_ready(generator)
        self._health.serve()

    def set_answerable(self, answerable: bool) -> None:
        """Turn NOT_SERVING and refuse calls while no replica could answer them; serve them again."""
        self._desk.set_answerable(answerable)
        if answerable:
            self._health.serve()
        else:
            self._health.pause()

    async def drain(self, forced: asyncio.Event) -> None:
        """Turn NOT_SERVING, refuse new calls, and let running ones finish within the drain timeout or until
        ``forced``.

        Those that do not finish end with UNAVAILABLE.
        """
        self._status.set_state(WorkerState.DRAINING)
        self._health.end()
        await self._desk.drain(forced, self._config.drain_timeout_s, self._say_that_time_is_over)

    def _say_that_time_is_over(self) -> None:
        logger.warning(
            "drain timeout of %g s is over; ending the calls that still run", self._config.drain_timeout_s
        )

    async def fail(self, error: EngineStoppedError) -> None:
        """Turn NOT_SERVING for good, refuse new calls and end those that run with the engine's error."""
        self._status.set_state(WorkerState.FAILED)
        self._health.end()
        await self._desk.fail(error)

    async def close(self) -> None:
        """Stop listening and cut what still runs."""
        await self._server.stop(grace=_LAST_CALLS_S)
        self._desk.close()


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # a second worker on the port must fail, not take half of the calls
        # Beyond gRPC's own 1,000 it cancels calls by chance, whoever's they are, so that one caller's flood
        # costs others theirs. Calls wait for the event loop alone here, which refuses what the queue has no
        # room for.
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
        # Strangers are bounded by what one connection may do, and by how many there are; a connection that
        # says nothing is closed.
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.absolute_max_metadata_size", 8 * 2**10),  # gRPC itself refuses by chance from 8 to 16 KiB
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_connection_idle_ms", 120_000),
        # A stream takes this much before its message is asked for, then as much as the message has.
        ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        # Clients may ping every 10 s, with or without a call; gRPC's own limit of 5 minutes would cut them
        # off.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        # A client that vanished without closing its connection is found within a minute, and its requests
        # aborted.
        ("grpc.keepalive_time_ms", 40_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


def _bind(server: grpc.aio.Server, config: ServerConfig) -> str:
    """Bind and return HOST:PORT with the real port. Raises PortError."""
    host, port = config.host, config.port
    shown = f"[{host}]" if ":" in host else host
    _probe(host, port, shown)
    try:
        credentials = config.security.server_credentials()
        if credentials is None:
            bound = server.add_insecure_port(f"{shown}:{port}")
        else:
            bound = server.add_secure_port(f"{shown}:{port}", credentials)
    except RuntimeError as error:
        raise _port_error(shown, port, str(error)) from error
    return f"{shown}:{bound}"


def _probe(host: str, port: int, shown: str) -> None:
    """Try to bind every address that ``host`` stands for. Raises PortError, with the system's reason, if one
    is taken.

    gRPC itself is content if it gets one of several (localhost on ::1 while another worker has 127.0.0.1),
    and does not say why it got none.
    """
    if not 0 <= port <= MAX_PORT:  # the system would cut it down to 16 bits
        raise PortError(f"cannot listen on {shown}:{port}: a port is a number from 0 to {MAX_PORT}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise PortError(
            f"cannot listen on {shown}:{port}: host not known ({error}); choose another host"
        ) from error
    reasons = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
                probe.listen(1)  # Linux tells of a listener on the port only now
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise _port_error(shown, port, error.strerror or str(error)) from error
            reasons.append(error.strerror)
    if len(reasons) == len(dict.fromkeys(found)):
        raise _port_error(shown, port, str(reasons[0]))


def _port_error(host: str, port: int, reason: str) -> PortError:
    return PortError(
        f"cannot listen on {host}:{port}: {reason}; stop what uses the port, or choose another with --port"
    )
