"""One worker process as a gRPC server: bind, load, serve, drain.

Input: an address and a function that loads a generator. Output: GenerationService, grpc.health.v1 and reflection
on that address. :func:`serve` is a worker's whole life and what ``llorch serve`` runs; :class:`WorkerServer` is
the same in steps.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from llorch_serve.errors import PortError
from llorch_serve.requests import TextGenerator
from llorch_serve.rpc import MAX_MESSAGE_BYTES, SERVICE_NAME
from llorch_serve.rpc.servicer import GenerationServicer

DEFAULT_PORT: Final = 50051
MAX_PORT: Final = 65_535
_FAREWELL_S: Final = 1.0  # for statuses of ended calls to leave the process

logger = logging.getLogger(__name__)


class ClosableGenerator(TextGenerator, Protocol):
    """A generator that the server owns and closes."""

    def close(self) -> None:
        """End what still runs, and free model and threads. Blocks until done; no update is delivered afterwards."""


class Front(Protocol):
    """Another way in to the same generator, on the same event loop, which lives and ends with the gRPC server."""

    async def bind(self) -> str:
        """Listen, and refuse requests; return HOST:PORT. Raises PortError."""

    def set_ready(self, generator: TextGenerator) -> None:
        """Serve requests."""

    async def drain(self, forced: asyncio.Event, timeout_s: float) -> None:
        """Refuse new requests and let running ones finish within the timeout or until ``forced``; end the rest."""

    async def close(self) -> None:
        """Stop listening and cut what still runs."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How a worker listens.

    host, port: loopback by default; port 0 takes any free one.
    drain_timeout_s: how long running calls may go on after a signal to stop, in seconds.
    max_message_bytes: largest message taken or sent, see MAX_MESSAGE_BYTES.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    drain_timeout_s: float = 30.0
    max_message_bytes: int = MAX_MESSAGE_BYTES


class WorkerServer:
    """A listening server. Made and used on one event loop; :meth:`bind` comes first, :meth:`close` last."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._server = grpc.aio.server(options=_options(config))
        self._servicer = GenerationServicer()
        self._health = health.aio.HealthServicer()

    async def bind(self) -> str:
        """Listen, answer health checks with NOT_SERVING and calls with UNAVAILABLE; return HOST:PORT.

        Raises PortError if the address cannot be bound.
        """
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        handlers = self._servicer.method_handlers()
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        services = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(services, self._server)
        address = _bind(self._server, self._config.host, self._config.port)
        await self._server.start()
        return address

    async def set_ready(self, generator: TextGenerator) -> None:
        """Serve calls with ``generator`` and turn SERVING."""
        self._servicer.start(generator, generator.model_info())
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def drain(self, forced: asyncio.Event) -> None:
        """Turn NOT_SERVING, refuse new calls, and let running ones finish within the drain timeout or until ``forced``.

        Those that do not finish end with UNAVAILABLE.
        """
        await self._health.enter_graceful_shutdown()
        self._servicer.refuse("the worker is shutting down; send the request to another")
        if not await _first(
            self._servicer.wait_idle(), forced.wait(), timeout_s=self._config.drain_timeout_s
        ):
            logger.warning(
                "drain timeout of %g s is over; ending the calls that still run", self._config.drain_timeout_s
            )
        self._servicer.end_all(
            "the worker shut down before the answer was complete; send the request to another"
        )
        await _first(self._servicer.wait_idle(), timeout_s=_FAREWELL_S)

    async def close(self) -> None:
        """Stop listening and cut what still runs."""
        await self._server.stop(grace=None)
        self._servicer.close()

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in (health.OVERALL_HEALTH, SERVICE_NAME):
            await self._health.set(name, status)


async def serve(
    open_generator: Callable[[], ClosableGenerator],
    config: ServerConfig,
    *,
    fronts: Sequence[Callable[[], Front]] = (),
    on_bound: Callable[[str], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Run a worker until SIGTERM or SIGINT, then drain; a second signal ends what runs at once.

    open_generator: loads and warms up the model; called on a thread once the address is bound.
    fronts: make further ways in, on the event loop.
    on_bound, on_ready: told HOST:PORT, with the real port, when listening and when SERVING.

    Must run on the main thread, which alone may handle signals. Raises PortError if the address cannot be bound,
    and whatever ``open_generator`` raises.
    """
    stopping, forced = asyncio.Event(), asyncio.Event()
    server = WorkerServer(config)
    beside = [make() for make in fronts]
    with _signals(stopping, forced):
        generator = None
        try:
            address = await server.bind()
            for front in beside:
                await front.bind()
            if on_bound is not None:
                on_bound(address)
            loading = _on_daemon_thread(open_generator)
            await _first(asyncio.wait([loading]), stopping.wait())
            if stopping.is_set():
                await _drain(server, beside, config, forced)
                # A load cannot be interrupted. Past the timeout its thread is left to end with the process.
                await _first(asyncio.wait([loading]), forced.wait(), timeout_s=config.drain_timeout_s)
                if loading.done():
                    generator = loading.result()
                return
            generator = loading.result()
            for front in beside:
                front.set_ready(generator)
            await server.set_ready(generator)
            if on_ready is not None:
                on_ready(address)
            await stopping.wait()
            await _drain(server, beside, config, forced)
        finally:
            for front in beside:
                await front.close()
            await server.close()
            if generator is not None:
                await asyncio.to_thread(generator.close)


async def _drain(
    server: WorkerServer, fronts: Sequence[Front], config: ServerConfig, forced: asyncio.Event
) -> None:
    await asyncio.gather(
        server.drain(forced), *(front.drain(forced, config.drain_timeout_s) for front in fronts)
    )


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # a second worker on the port must fail, not take half of the calls
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        # Clients may ping every 10 s, with or without a call; gRPC's own limit of 5 minutes would cut them off.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        # A client that vanished without closing its connection is found within a minute, and its requests aborted.
        ("grpc.keepalive_time_ms", 40_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


def _bind(server: grpc.aio.Server, host: str, port: int) -> str:
    """Bind and return HOST:PORT with the real port. Raises PortError."""
    shown = f"[{host}]" if ":" in host else host
    _probe(host, port, shown)
    try:
        bound = server.add_insecure_port(f"{shown}:{port}")
    except RuntimeError as error:
        raise _port_error(shown, port, str(error)) from error
    return f"{shown}:{bound}"


def _probe(host: str, port: int, shown: str) -> None:
    """Try to bind every address that ``host`` stands for. Raises PortError, with the system's reason, if one is taken.

    gRPC itself is content if it gets one of several (localhost on ::1 while another worker has 127.0.0.1), and
    does not say why it got none.
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


async def _first(*events: Awaitable[object], timeout_s: float | None = None) -> bool:
    """Wait for the first of several events; tell whether one came before the timeout."""
    tasks = [asyncio.ensure_future(event) for event in events]
    done, pending = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    return bool(done)


def _on_daemon_thread(load: Callable[[], ClosableGenerator]) -> asyncio.Future[ClosableGenerator]:
    """Run ``load`` on a thread that does not keep the process alive."""
    result: Future[ClosableGenerator] = Future()

    def run() -> None:
        try:
            result.set_result(load())
        except BaseException as error:  # noqa: BLE001 - passed on whole to whoever waits for the result
            result.set_exception(error)

    threading.Thread(target=run, name="llorch-load", daemon=True).start()
    return asyncio.wrap_future(result)


@contextmanager
def _signals(stopping: asyncio.Event, forced: asyncio.Event) -> Iterator[None]:
    """Set ``stopping`` on the first SIGTERM or SIGINT and ``forced`` on the second; undone afterwards."""
    loop = asyncio.get_running_loop()

    def count() -> None:
        (forced if stopping.is_set() else stopping).set()

    def handle(_number: int, _frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(count)

    # signal.signal rather than the loop's add_signal_handler, which Windows lacks.
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
