"""A worker's whole life: bind, load, serve, drain; and what ends it early.

Input: a function that loads a generator, an address, signals. Output: the methods of
:class:`llorch_serve.rpc.server.WorkerServer` called in the right order, and the error that the process ends
with.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType

from llorch_serve.calls.interfaces import ClosableGenerator, Companion, FrontFactory, ReadyWorker, spread_of
from llorch_serve.calls.waiting import first_of
from llorch_serve.engine.load import WorkerState
from llorch_serve.errors import EngineStoppedError, UnavailableError
from llorch_serve.lifecycle.fronts import Fronts
from llorch_serve.loading.progress import LoadProgress
from llorch_serve.rpc.server import ServerConfig, WorkerServer

logger = logging.getLogger(__name__)


async def serve(
    open_generator: Callable[[], ClosableGenerator],
    config: ServerConfig,
    *,
    progress: LoadProgress | None = None,
    fronts: Sequence[FrontFactory] = (),
    companions: Sequence[Companion] = (),
    on_bound: Callable[[str], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Run a worker until SIGTERM or SIGINT, then drain; a second signal ends what runs at once.

    open_generator: loads and warms up the model; called on a thread once the address is bound.
    progress: counted by ``open_generator``; cancelled by a signal during the load.
    fronts: make further fronts, on the event loop.
    on_bound, on_ready: told HOST:PORT, with the real port, when listening and when SERVING.

    Must run on the main thread, which alone may handle signals. Raises PortError if the address cannot be
    bound, whatever ``open_generator`` or a companion raises, and EngineStoppedError if the engine dies.
    """
    stopping, forced = asyncio.Event(), asyncio.Event()
    progress = progress or LoadProgress()
    server = Fronts(WorkerServer(config, progress), fronts)
    with _signals(stopping, forced):
        generator = None
        try:
            address = await server.bind()
            if on_bound is not None:
                on_bound(address)
            generator = await _load(open_generator, progress, server, stopping, forced)
            if generator is None:
                return
            dead = _watch(generator)
            with _spared_from_collection():
                await server.set_ready(generator)
                _follow(generator, server)
                if on_ready is not None:
                    on_ready(address)
                worker = ReadyWorker(address, generator, server.load)
                await _until_drained(server, worker, companions, dead, stopping, forced)
            await _tell(companions, WorkerState.STOPPED)
        except BaseException:
            await _tell(companions, WorkerState.FAILED)
            raise
        finally:
            await server.close()
            if generator is not None:
                await asyncio.to_thread(generator.close)


async def _load(
    open_generator: Callable[[], ClosableGenerator],
    progress: LoadProgress,
    server: Fronts,
    stopping: asyncio.Event,
    forced: asyncio.Event,
) -> ClosableGenerator | None:
    """Return the loaded generator, or None if a signal came first and the load was left."""
    loading = _on_daemon_thread(open_generator)
    await first_of(asyncio.wait([loading]), stopping.wait())
    if not stopping.is_set():
        return loading.result()
    progress.cancel()
    await server.drain(forced)
    # A load cannot be interrupted everywhere. Past the timeout its thread is left to end with the process.
    await first_of(asyncio.wait([loading]), forced.wait(), timeout_s=server.drain_timeout_s)
    if loading.done():
        try:
            await asyncio.to_thread(loading.result().close)
        except UnavailableError:
            logger.info("the load was given up")
    return None


async def _until_drained(
    server: Fronts,
    worker: ReadyWorker,
    companions: Sequence[Companion],
    dead: asyncio.Future[EngineStoppedError],
    stopping: asyncio.Event,
    forced: asyncio.Event,
) -> None:
    """Serve until something ends it, then drain. Raises EngineStoppedError, or what a companion raised."""
    duties = [asyncio.ensure_future(companion.run(worker)) for companion in companions]
    failed = [asyncio.wait(duties, return_when=asyncio.FIRST_EXCEPTION)] if duties else []
    try:
        await first_of(stopping.wait(), asyncio.wait([dead]), server.wait_unused(), *failed)
        if not dead.done():
            farewell = asyncio.ensure_future(_tell(companions, WorkerState.DRAINING))
            await first_of(server.drain(forced), asyncio.wait([dead]))
            await farewell
        if dead.done():
            await server.fail(dead.result())
            raise dead.result()
        for duty in duties:
            if duty.done():
                duty.result()
    finally:
        for duty in duties:
            duty.cancel()
        await asyncio.gather(*duties, return_exceptions=True)


async def _tell(companions: Sequence[Companion], state: WorkerState) -> None:
    await asyncio.gather(*(companion.tell(state) for companion in companions))


def _watch(generator: ClosableGenerator) -> asyncio.Future[EngineStoppedError]:
    """Return a future that the engine's death completes."""
    loop = asyncio.get_running_loop()
    dead: asyncio.Future[EngineStoppedError] = loop.create_future()

    def settle(error: EngineStoppedError) -> None:
        if not dead.done():
            dead.set_result(error)

    def tell(error: EngineStoppedError) -> None:
        loop.call_soon_threadsafe(settle, error)

    generator.when_dead(tell)
    return dead


def _follow(generator: ClosableGenerator, server: Fronts) -> None:
    """Have the fronts take requests only while replicas are there, where it has any."""
    loop, spread = asyncio.get_running_loop(), spread_of(generator)

    def tell(answerable: bool) -> None:
        loop.call_soon_threadsafe(server.set_answerable, answerable)

    if spread is not None:
        spread.when_answerable(tell)


@contextmanager
def _spared_from_collection() -> Iterator[None]:
    """Keep the garbage collector from what is there: modules and the model, which stay until the end.

    To look through all of it took 40 ms again and again, for which every answer and health check waited.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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
