"""An HTTP front in this process, on an event loop of its own thread, around a fake generator or any other."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from llorch_serve.calls.front_desk import FrontDesk
from llorch_serve.engine.load import Load
from llorch_serve.http.server import HttpConfig, HttpFront
from llorch_serve.http.settings import DEFAULT_SETTINGS, HttpSettings
from llorch_serve.http.status_routes import LookAtReplicas, no_replicas
from llorch_serve.lifecycle.fronts import Fronts
from llorch_serve.observe.observer import Answered
from llorch_serve.requests import TextGenerator
from llorch_serve.rpc.server import ServerConfig, WorkerServer
from support.fakes.generator import PATIENCE_S, FakeGenerator
from support.harness.routing import reached


@dataclass
class RunningFront:
    """A front that serves at ``base``, beside gRPC at ``rpc``, and what has been answered so far."""

    port: int
    rpc: str
    fronts: Fronts
    loop: asyncio.AbstractEventLoop
    answered: list[Answered] = field(default_factory=list)

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def http_front(self) -> Any:
        return self.fronts._fronts[0]

    @property
    def http_desk(self) -> FrontDesk:
        desk: FrontDesk = self.http_front._desk
        return desk

    @property
    def rpc_desk(self) -> FrontDesk:
        return self.fronts._server._desk

    def on_loop(self, work: Any) -> Any:
        """Run a coroutine on the front's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)


@dataclass(frozen=True)
class Answer:
    """A whole HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[tuple[str | None, Any]]:
        """The events, each with its name and decoded data; fails unless the last one is [DONE]."""
        found = []
        for block in self.body.decode().strip().split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.split("\n"))
            found.append((lines.get("event"), lines["data"]))
        assert found[-1] == (None, "[DONE]")
        return [(name, json.loads(data)) for name, data in found[:-1]]


def send(
    port: int,
    method: str,
    path: str,
    body: object = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """Send one request with the standard library; a body that is no bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        typed = {} if raw is None else {"Content-Type": "application/json"}
        connection.request(method, path, raw, typed | (headers or {}))
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


@contextlib.contextmanager
def running_front(
    generator: TextGenerator | None,
    *,
    token: str | None = None,
    exposition: Any = None,
    tls: Any = None,
    drain_timeout_s: float = PATIENCE_S,
    settings: HttpSettings = DEFAULT_SETTINGS,
    replicas: LookAtReplicas = no_replicas,
) -> Iterator[RunningFront]:
    """Serve a generator over HTTP, beside a gRPC server; None: still loading."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="test-http", daemon=True)
    thread.start()
    answered: list[Answered] = []
    ports: list[int] = []

    def make(load: Callable[[], Load]) -> HttpFront:
        return HttpFront(
            HttpConfig(
                "127.0.0.1",
                0,
                () if token is None else (token, "another"),
                tls,
                stream_interval=1,
                settings=settings,
            ),
            load,
            exposition or (lambda: (b"", "text/plain")),
            on_answered=answered.append,
            on_bound=lambda address: ports.append(int(address.rpartition(":")[2])),
            replicas=replicas,
        )

    async def start(generator: TextGenerator | None) -> tuple[Fronts, str]:
        server = WorkerServer(ServerConfig(port=0, drain_timeout_s=drain_timeout_s))
        fronts = Fronts(server, (make,))
        address = await fronts.bind()
        if generator is not None:
            await fronts.set_ready(generator)
        return fronts, address

    stack = contextlib.ExitStack()
    served = stack.enter_context(reached(generator))
    fronts, address = asyncio.run_coroutine_threadsafe(start(served), loop).result(PATIENCE_S)
    running = RunningFront(ports[0], address, fronts, loop, answered)
    try:
        with stack:
            yield running
    finally:
        running.on_loop(fronts.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()


@contextlib.contextmanager
def fake_front(**how: Any) -> Iterator[tuple[RunningFront, FakeGenerator]]:
    """Serve a fake generator over HTTP; ``how`` shapes the generator."""
    names = ("token", "tls", "drain_timeout_s", "settings", "replicas")
    front = {name: how.pop(name) for name in names if name in how}
    generator = FakeGenerator(**how)
    try:
        with running_front(generator, **front) as running:
            yield running, generator
    finally:
        generator.close()
