"""The HTTP front's life: bind, serve, drain, close, on the gRPC server's event loop.

Input: an address, then the loaded generator. Output: a listening uvicorn server. It is told what to do by the
worker's own life (``lifecycle/serving.py``) and handles no signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import uvicorn

from llorch_serve.calls.callers import TokenList
from llorch_serve.calls.front_desk import FrontDesk
from llorch_serve.engine.load import Load
from llorch_serve.errors import EngineStoppedError, PortError
from llorch_serve.http.app import OPEN_PATHS, make_routes
from llorch_serve.http.batches.front import FrontBatches
from llorch_serve.http.connection import IDLE_TIMEOUT_S, Connection
from llorch_serve.http.connection_limit import ConnectionLimit, Listener
from llorch_serve.http.guard import Access, Guard
from llorch_serve.http.origins import Origins
from llorch_serve.http.service import HttpService
from llorch_serve.http.settings import DEFAULT_SETTINGS, HttpSettings
from llorch_serve.http.status_routes import Exposition, LookAtReplicas, no_replicas
from llorch_serve.observe.observer import Answered
from llorch_serve.requests import TextGenerator

MAX_HEAD_BYTES: Final = 32 * 2**10
MAX_PENDING_BYTES: Final = 64 * 2**20  # of bodies that wait to be read
_LOADING: Final = "the worker is loading its model; try again when GET /health says 200"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """How the front listens.

    host, port: port 0 takes any free one. tokens: requests must carry one of them; none: no token is asked
        for.
    tls: None: plain HTTP. stream_interval: tokens of an answer that one event of its stream waits for; None:
        as the load asks for.
    settings: what else whoever runs the worker decides.
    """

    host: str
    port: int
    tokens: tuple[str, ...] = field(default=(), repr=False)
    tls: ssl.SSLContext | None = None
    stream_interval: int | None = None
    settings: HttpSettings = DEFAULT_SETTINGS


class _Server(uvicorn.Server):
    """uvicorn without hands on the process's signals, which belong to the worker's life."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpFront:
    """A listening front. Made and used on one event loop; :meth:`bind` comes first, :meth:`close` last."""

    def __init__(
        self,
        config: HttpConfig,
        load: Callable[[], Load],
        exposition: Exposition,
        on_answered: Callable[[Answered], None] = lambda _: None,
        on_bound: Callable[[str], None] = lambda _: None,
        replicas: LookAtReplicas = no_replicas,
    ) -> None:
        self._config = config
        self._on_bound = on_bound
        self._limit = ConnectionLimit()
        self._desk = FrontDesk(
            "llorch-http",
            _LOADING,
            max_pending_bytes=MAX_PENDING_BYTES,
            stream_interval=config.stream_interval,
        )
        self._service = HttpService(self._desk, load)
        settings = config.settings
        origins = Origins(frozenset(settings.origins))
        self._batches = FrontBatches(settings.batches, self._service, origins, settings.unknown)
        self._routes = make_routes(
            self._service, exposition, settings.unknown, replicas, self._batches.endpoints
        )
        access = Access(
            TokenList(config.tokens) if config.tokens else None,
            OPEN_PATHS,
            hosts_of(config.host, settings.hosts),
            origins,
        )
        self._server = _Server(
            uvicorn.Config(
                Guard(self._routes, access, on_answered),
                ssl_context_factory=None if config.tls is None else lambda *_, tls=config.tls: tls,
                http=functools.partial(Connection, limit=self._limit),  # type: ignore[arg-type]  # it is only called
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_keep_alive=round(IDLE_TIMEOUT_S),
                timeout_graceful_shutdown=1,
            )
        )
        self._running: asyncio.Task[None] | None = None

    async def bind(self) -> str:
        """Listen and answer with 503; return HOST:PORT.

        Raises PortError if the address cannot be bound, UsageError if files cannot be kept where they should.
        """
        await self._batches.open()
        sockets = _listen(self._config.host, self._config.port, self._limit)
        self._running = asyncio.ensure_future(self._server.serve(sockets))
        shown = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        address = f"{shown}:{sockets[0].getsockname()[1]}"
        self._on_bound(address)
        return address

    def set_ready(self, generator: TextGenerator) -> None:
        """Answer with ``generator``."""
        self._desk.open(generator)
        self._batches.start(generator, self._routes)

    def set_answerable(self, answerable: bool) -> None:
        """Refuse requests while no replica could answer them, and take them again."""
        self._desk.set_answerable(answerable)

    def idle_s(self) -> float:
        """Return for how long no request has run, in seconds."""
        return self._desk.idle_s()

    async def drain(self, forced: asyncio.Event, timeout_s: float) -> None:
        """Refuse new requests, let running ones finish within the timeout or until ``forced``, and end the
        rest.
        """
        await self._batches.stop()
        await self._desk.drain(forced, timeout_s)

    async def fail(self, error: EngineStoppedError) -> None:
        """Refuse new requests for good and end those that run with the engine's error."""
        await self._batches.stop()
        await self._desk.fail(error)

    async def close(self) -> None:
        """Stop listening and cut what still runs."""
        self._server.should_exit = True
        if self._running is not None:
            await self._running
        await self._batches.close()
        self._desk.close()


def hosts_of(host: str, allowed: Sequence[str] = ()) -> frozenset[str] | None:
    """Return the names under which a worker at ``host`` is addressed; None: any.

    On the loopback they are its own, elsewhere any. Those that are ``allowed`` are further ones, and then the
    only ones elsewhere too.
    """
    if "*" in allowed:
        return None
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        address = None
    if not allowed and (address is None or not address.is_loopback):
        return None
    shown = f"[{host}]" if ":" in host else host.lower()
    own = () if address is not None and address.is_unspecified else (shown,)
    return frozenset({"localhost", "127.0.0.1", "[::1]", *own, *allowed})


def read_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, ``[::1]:PORT`` or ``PORT`` alone, which means the loopback.
    Raises PortError.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isdecimal() or not 0 <= int(port) <= 65_535:  # the highest port that there is
        raise PortError(f"--http is {text!r}; expected HOST:PORT or PORT, with a port from 0 to 65535")
    return host, int(port)


def _listen(host: str, port: int, limit: ConnectionLimit) -> list[socket.socket]:
    """Return listening sockets, one for each address that ``host`` stands for. Raises PortError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise PortError(
            f"cannot listen on {host}:{port}: host not known ({error}); choose another host"
        ) from error
    sockets: list[socket.socket] = []
    reason: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        taken = sockets[0].getsockname()[1] if sockets else port
        try:
            sockets.append(_bound(Listener(limit, family, kind, protocol), (address[0], taken, *address[2:])))
        except OSError as error:
            reason = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break  # localhost may have no IPv6 here; any other failure counts
    else:
        if sockets:
            return sockets
    for listener in sockets:
        listener.close()
    raise PortError(
        f"cannot listen on {host}:{port}: {reason.strerror if reason else 'no address'}; "
        "stop what uses the port, or choose another with --http"
    ) from reason


def _bound(listener: socket.socket, address: tuple[object, ...]) -> socket.socket:
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(128)  # now, so that a taken port is known before the model loads
    except OSError:
        listener.close()
        raise
    return listener
