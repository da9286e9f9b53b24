"""What ``llorch serve`` runs beside the gRPC server: the HTTP front, metrics, narration and traces.

Input: flags. Output: fronts for :func:`llorch_serve.rpc.server.serve`, and a wrapper that puts observers around the loaded
generator. A library that is not installed is named, with its pip line, before anything is loaded.
"""

from __future__ import annotations

import importlib.metadata
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from llorch_serve.observe.logs import writes_json
from llorch_serve.observe.narration import Narrator
from llorch_serve.observe.tap import Answered, ObservedGenerator, Observer
from llorch_serve.rpc.server import ClosableGenerator, Front
from llorch_serve.terminal.console import say
from llorch_serve.terminal.requirements import required


@dataclass(frozen=True, slots=True)
class Beside:
    """fronts: for the server. observe: puts observers around the generator. narrator: tells the worker's own life."""

    fronts: tuple[Callable[[], Front], ...]
    observe: Callable[[ClosableGenerator], ClosableGenerator]
    narrator: Narrator

    def announce(self, action: str, target: str, human: str) -> None:
        """Tell of the worker's own life: a line for people, or an event where the log is JSON."""
        announce(self.narrator, action, target, human)


def announce(narrator: Narrator, action: str, target: str, human: str) -> None:
    """Print a line on stderr, or tell an event where the log is JSON."""
    if writes_json():
        narrator.tell(action, target, human)
    else:
        say(human)


def open_beside(http: str | None, otlp_endpoint: str | None, *, tokens: tuple[str, ...] = ()) -> Beside:
    """Prepare what the flags ask for. Raises ProviderError for a missing library and PortError for a bad address."""
    narrator = Narrator(f"{socket.gethostname()}-{os.getpid()}")
    makers: list[Callable[[ClosableGenerator], Observer]] = [lambda _: narrator]
    fronts: list[Callable[[], Front]] = []
    if http is not None:
        front, maker = _http_front(http, tokens, narrator)
        fronts.append(front)
        makers.append(maker)
    if otlp_endpoint is not None:
        makers.append(_tracer(otlp_endpoint))

    def observe(generator: ClosableGenerator) -> ClosableGenerator:
        return ObservedGenerator(generator, [make(generator) for make in makers])

    return Beside(tuple(fronts), observe, narrator)


def _http_front(
    address: str, tokens: tuple[str, ...], narrator: Narrator
) -> tuple[Callable[[], Front], Callable[[ClosableGenerator], Observer]]:
    """Return what makes the front, and what makes the observer behind its /metrics."""
    with required("http"):
        from llorch_serve.http.app import route_of
        from llorch_serve.http.server import HttpConfig, HttpFront, read_address
        from llorch_serve.observe.meters import Meters
    host, port = read_address(address)
    meters = Meters()

    def watch(generator: ClosableGenerator) -> Observer:
        meters.watch(generator)
        return meters

    def answered(answer: Answered) -> None:
        narrator.answered(answer)
        if answer.status is not None:
            meters.count_http(route_of(answer.path), answer.status)

    def make() -> Front:
        return HttpFront(
            HttpConfig(host, port, tokens),
            meters.expose,
            on_answered=answered,
            on_bound=lambda bound: announce(narrator, "http.listen", bound, f"HTTP at http://{bound}"),
        )

    return make, watch


def _tracer(endpoint: str) -> Callable[[ClosableGenerator], Observer]:
    with required("otel"):
        from llorch_serve.observe.traces import Tracer, otlp_provider
    provider = otlp_provider(endpoint, importlib.metadata.version("llorch"))
    return lambda generator: Tracer(provider, generator.model_info().model_id)
