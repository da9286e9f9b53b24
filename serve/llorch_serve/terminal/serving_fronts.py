"""What ``llorch serve`` runs besides the gRPC server: the HTTP front, metrics, narration and traces.

Input: flags. Output: fronts for :func:`llorch_serve.lifecycle.serving.serve`, and a wrapper that puts
observers around the loaded generator. A library that is not installed is named, with its pip line, before
anything is loaded.
"""

from __future__ import annotations

import importlib.metadata
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llorch_serve.calls.interfaces import ClosableGenerator, Front, FrontFactory
from llorch_serve.calls.trace_endpoint import check_endpoint
from llorch_serve.cluster.interfaces import ReplicaLoad
from llorch_serve.cluster.totals import totals_of
from llorch_serve.engine.load import Load
from llorch_serve.http.settings import DEFAULT_SETTINGS, HttpSettings
from llorch_serve.observe.logs import writes_json
from llorch_serve.observe.narration import Narrator
from llorch_serve.observe.observer import Answered, Observer
from llorch_serve.observe.tap import ObservedGenerator
from llorch_serve.rpc.security import OPEN, Security
from llorch_serve.terminal.console import say
from llorch_serve.terminal.requirements import required
from llorch_serve.terminal.security_flags import judge_exposure


@dataclass(frozen=True, slots=True)
class ServingFronts:
    """What listens and watches besides the gRPC server.

    fronts: for the server. observe: puts observers around the generator. narrator: tells of the worker's own
    life. urls: of the HTTP front, once it listens.
    """

    fronts: tuple[FrontFactory, ...]
    observe: Callable[[ClosableGenerator], ClosableGenerator]
    narrator: Narrator
    urls: Sequence[str] = ()

    def url(self) -> str | None:
        """Return where the HTTP front listens, as scheme://HOST:PORT; None: there is none, or not yet."""
        return next(iter(self.urls), None)

    def announce(self, action: str, target: str, human: str) -> None:
        """Tell of the worker's own life: a line for people, or an event where the log is JSON."""
        announce(self.narrator, action, target, human)


def announce(narrator: Narrator, action: str, target: str, human: str) -> None:
    """Print a line on stderr, or tell an event where the log is JSON."""
    if writes_json():
        narrator.tell(action, target, human)
    else:
        say(human)


def open_fronts(
    http: str | None,
    otlp_endpoint: str | None,
    *,
    worker_id: str | None = None,
    security: Security = OPEN,
    tls: ssl.SSLContext | None = None,
    require_auth: bool = False,
    stream_interval: int | None = None,
    settings: HttpSettings = DEFAULT_SETTINGS,
) -> ServingFronts:
    """Prepare what the flags ask for. settings: of the HTTP front.

    Raises ProviderError, PortError or UsageError.
    """
    narrator = Narrator(worker_id or f"{socket.gethostname()}-{os.getpid()}")
    makers: list[Callable[[ClosableGenerator], Observer]] = []
    fronts: list[FrontFactory] = []
    urls: list[str] = []
    if http is not None:
        front, maker = _http_front(
            http,
            security,
            tls,
            narrator,
            require_auth=require_auth,
            stream_interval=stream_interval,
            settings=settings,
            on_bound=urls.append,
        )
        fronts.append(front)
        makers.append(maker)
    if otlp_endpoint is not None:
        makers.append(_tracer(otlp_endpoint))
    makers.append(lambda _: narrator)  # last, so that what a line tells of has been counted

    def observe(generator: ClosableGenerator) -> ClosableGenerator:
        return ObservedGenerator(generator, [make(generator) for make in makers])

    return ServingFronts(tuple(fronts), observe, narrator, urls)


def read_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> ssl.SSLContext | None:
    """Return what makes HTTP speak TLS with files that ``load_security`` has checked; None without them."""
    if cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_ca)
    context.load_cert_chain(cert, key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _http_front(
    address: str,
    security: Security,
    tls: ssl.SSLContext | None,
    narrator: Narrator,
    *,
    require_auth: bool,
    stream_interval: int | None,
    settings: HttpSettings,
    on_bound: Callable[[str], None],
) -> tuple[FrontFactory, Callable[[ClosableGenerator], Observer]]:
    """Return what makes the front, and what makes the observer behind its /metrics.

    on_bound: told the front's URL once it listens.
    """
    with required("http"):
        from llorch_serve.http.operations import route_of
        from llorch_serve.http.server import HttpConfig, HttpFront, read_address
        from llorch_serve.observe.meters import Meters
    host, port = read_address(address)
    judge_exposure(host, security, require_auth=require_auth)
    scheme = "http" if tls is None else "https"
    meters = Meters()
    watched: list[ClosableGenerator] = []

    def watch(generator: ClosableGenerator) -> Observer:
        meters.watch(generator)
        watched.append(generator)
        return meters

    def replicas() -> Sequence[ReplicaLoad] | None:
        totals = totals_of(watched[-1]) if watched else None
        return None if totals is None else totals.replicas

    def answered(answer: Answered) -> None:
        narrator.answered(answer)
        if answer.status is not None:
            meters.count_http(route_of(answer.path), answer.status)

    def tell(bound: str) -> None:
        announce(narrator, "http.listen", bound, f"HTTP at {scheme}://{bound}")
        on_bound(f"{scheme}://{bound}")

    def make(load: Callable[[], Load]) -> Front:
        return HttpFront(
            HttpConfig(host, port, security.tokens, tls, stream_interval, settings),
            load,
            meters.expose,
            on_answered=answered,
            on_bound=tell,
            replicas=replicas,
        )

    return make, watch


def _tracer(endpoint: str) -> Callable[[ClosableGenerator], Observer]:
    check_endpoint("--otlp-endpoint", endpoint)
    with required("otel"):
        from llorch_serve.observe.traces import Tracer, otlp_provider
    provider = otlp_provider(endpoint, importlib.metadata.version("llorch"))
    return lambda generator: Tracer(provider, lambda: generator.model_info().model_id)
