"""The parts of a running worker as protocols: the generator, the fronts, and the companions.

``lifecycle/serving.py`` leads them through it; fronts, observers and companions implement these protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from llorch_serve.engine.load import Load, WorkerState
from llorch_serve.errors import EngineStoppedError
from llorch_serve.requests import TextGenerator

if TYPE_CHECKING:
    import asyncio


class ClosableGenerator(TextGenerator, Protocol):
    """A generator that the server owns and closes."""

    def when_dead(self, tell: Callable[[EngineStoppedError], None]) -> None:
        """Have ``tell`` called, on any thread, if the engine stops after an error; at once if it has."""

    def close(self) -> None:
        """End what still runs, and free model and threads. Blocks until done; no update is delivered
        afterwards.
        """


@runtime_checkable
class SpreadGenerator(Protocol):
    """A generator whose model runs on replicas, which other fronts use too."""

    def abort_everywhere(self, request_ids: Sequence[str], owner: str) -> tuple[str, ...]:
        """End a caller's live requests, whatever front they came by; return the ids of those that were live.
        Blocks.
        """

    def when_answerable(self, tell: Callable[[bool], None]) -> None:
        """Have ``tell`` called, on any thread, whenever no replica is there any more, and when one is
        again.
        """


def spread_of(generator: TextGenerator | None) -> SpreadGenerator | None:
    """Return the generator behind observers if its model runs on replicas, else None."""
    inner = getattr(generator, "inner", generator)
    return inner if isinstance(inner, SpreadGenerator) else None


class Front(Protocol):
    """Serves the same generator as the gRPC server over another protocol. It runs on the same event loop and
    ends with that server.
    """

    async def bind(self) -> str:
        """Listen, and refuse requests; return HOST:PORT. Raises PortError."""

    def set_ready(self, generator: TextGenerator) -> None:
        """Serve requests."""

    def set_answerable(self, answerable: bool) -> None:
        """Refuse requests while no replica could answer them, and take them again."""

    def idle_s(self) -> float:
        """Return for how long no request has run, in seconds."""

    async def drain(self, forced: asyncio.Event, timeout_s: float) -> None:
        """Refuse new requests and let running ones finish within the timeout or until ``forced``; end the
        rest.
        """

    async def fail(self, error: EngineStoppedError) -> None:
        """Refuse new requests for good and end those that run with the engine's error."""

    async def close(self) -> None:
        """Stop listening and cut what still runs."""


FrontFactory = Callable[[Callable[[], Load]], Front]
"""Makes a front; it is given what returns the worker's state, how far it has loaded and how busy it is."""


@dataclass(frozen=True, slots=True)
class ReadyWorker:
    """What companions see of a worker that serves. address: HOST:PORT. load: how busy it is, and its
    state.
    """

    address: str
    generator: TextGenerator
    load: Callable[[], Load]


class Companion(Protocol):
    """A task that runs as long as the worker serves, on the same event loop."""

    async def run(self, worker: ReadyWorker) -> None:
        """Do its work from SERVING on, until cancelled. An error raised here drains the worker and ends
        it.
        """

    async def tell(self, state: WorkerState) -> None:
        """Learn that the worker drains, has stopped or has failed. Must return within seconds and raise
        nothing.
        """
