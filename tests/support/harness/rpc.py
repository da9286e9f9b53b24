"""A worker's gRPC server on a loop of its own thread, for tests that talk to it over a real channel."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from llorch_serve.calls.admission import POOL_THREADS
from llorch_serve.requests import TextGenerator
from llorch_serve.rpc import worker_pb2_grpc
from llorch_serve.rpc.server import ServerConfig, WorkerServer
from support.fakes.generator import PATIENCE_S, FakeGenerator
from support.harness.routing import reached


class RunningServer:
    """A bound server; ``address`` is HOST:PORT. :meth:`call` runs a coroutine on its loop."""

    def __init__(self, config: ServerConfig) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-server", daemon=True)
        self._thread.start()
        try:
            self.server: WorkerServer = self.call(self._make(config))
            self.address: str = self.call(self.server.bind())
        except BaseException:
            self._end_loop()
            raise

    @staticmethod
    async def _make(config: ServerConfig) -> WorkerServer:
        return WorkerServer(config)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.start(coroutine).result(PATIENCE_S)

    def close(self) -> None:
        self.call(self.server.close())
        self._end_loop()

    def _end_loop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()


@contextmanager
def running_server(generator: TextGenerator | None = None, **config: Any) -> Iterator[RunningServer]:
    """A server on a free port; still loading unless it is given a generator.

    Every token has a message, unless said otherwise: a fake engine makes a whole answer in the time that
    others wait for one.
    """
    running = RunningServer(ServerConfig(port=0, **{"stream_interval": 1, **config}))
    try:
        with reached(generator) as front:
            if front is not None:
                running.call(running.server.set_ready(front))
            yield running
    finally:
        if isinstance(generator, FakeGenerator):
            generator.close()
        running.close()


@contextmanager
def open_stub(address: str, **options: int) -> Iterator[worker_pb2_grpc.GenerationServiceStub]:
    """A plain generated stub, as any other client would use it."""
    with grpc.insecure_channel(address, options=[(f"grpc.{k}", v) for k, v in options.items()]) as channel:
        yield worker_pb2_grpc.GenerationServiceStub(channel)


@contextmanager
def held_up(desk: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Keep what reads requests busy until all of them have been ended; yields what is set once one waits to
    be read.
    """
    gate, queued = threading.Event(), threading.Event()
    threads, end_all, run = desk._threads, desk.end_all, desk._threads.run
    for _ in range(POOL_THREADS):
        threads._pool.submit(gate.wait, PATIENCE_S)

    async def watched(size: int, work: Any) -> Any:
        queued.set()
        return await run(size, work)

    def ended(error: Exception) -> None:
        end_all(error)
        gate.set()

    monkeypatch.setattr(threads, "run", watched)
    monkeypatch.setattr(desk, "end_all", ended)
    try:
        yield queued
    finally:
        gate.set()
