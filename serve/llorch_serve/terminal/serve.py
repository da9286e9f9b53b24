"""``llorch serve``: a gRPC worker for one artifact."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llorch_serve.config import EngineConfig
from llorch_serve.errors import UsageError
from llorch_serve.loading.progress import LoadProgress, read_ahead
from llorch_serve.terminal.console import say
from llorch_serve.terminal.greeting import Welcome, is_wanted
from llorch_serve.terminal.groups import composed, only
from llorch_serve.terminal.http_flags import HttpFlags
from llorch_serve.terminal.security_flags import SecurityFlags, judge_exposure
from llorch_serve.terminal.serving_flags import (
    FrontFlags,
    ListenFlags,
    LogFlags,
    MessageFlags,
    NameFlags,
    PoolFlags,
    QueueFlags,
    ShutdownFlags,
    read_message_bytes,
    read_stream_interval,
)
from llorch_serve.terminal.session_flags import EngineFlags, HugePages, ProviderFlags, SessionFlags
from llorch_serve.terminal.target import ModelFlags, export_source, find_artifact, find_tokenizer

if TYPE_CHECKING:
    from llorch_serve.loading.worker import AnyWorker
    from llorch_serve.pool.reporter import PoolConfig
    from llorch_serve.rpc.server import ServerConfig
    from llorch_serve.terminal.serving_fronts import ServingFronts


@composed
def command(
    model: ModelFlags,
    listen: ListenFlags,
    slots: Annotated[int, typer.Option(help="Sequences that run at once; others wait.")] = 8,
    *,
    session: SessionFlags,
    huge_pages: HugePages = None,
    engine: Annotated[
        EngineFlags,
        only("no_prefix_cache", "strict_reuse", "lookup", "tool_format", "reasoning_format", "rank_format"),
    ],
    provider: ProviderFlags,
    name: NameFlags,
    queue: QueueFlags,
    messages: MessageFlags,
    secrets: SecurityFlags,
    pool: PoolFlags,
    shutdown: ShutdownFlags,
    front: FrontFlags,
    http: HttpFlags,
    log: LogFlags,
    preload_only: Annotated[
        bool,
        typer.Option(
            "--preload-only/--no-preload-only",
            help="Load and warm up as for serving, say what came of it, and exit; no port is opened.",
        ),
    ] = False,
) -> None:
    """Serve an artifact, or a folder of onnxruntime-genai or Optimum, over gRPC (llorch.v1.GenerationService,
    health, reflection), and HTTP if asked to, until SIGTERM.

    For example:

        llorch serve artifacts/smollm2

        llorch serve artifacts/smollm2 --port 0 --slots 16 --max-context 4096

        llorch serve artifacts/smollm2 --http 8080

        LLORCH_API_TOKEN=... llorch serve artifacts/smollm2 --host 0.0.0.0 --tls-cert cert.pem --tls-key
        key.pem

        grpcurl -plaintext -d '{"input": {"text": "Once"}}' 127.0.0.1:50051 llorch.v1.GenerationService/Generate

    """  # noqa: E501 - an example is one line
    from llorch_serve.rpc.server import ServerConfig
    from llorch_serve.terminal.serving_fronts import open_fronts, read_tls

    if slots < 1:
        raise UsageError(f"--slots is {slots}; at least 1 is needed")
    log.set_up()
    interval = read_stream_interval(messages.stream_interval)
    target = model.target()
    folder, tokenizer = find_artifact(target), find_tokenizer()
    config = engine.config(session.config(provider, slots=slots, huge_pages=huge_pages))
    loading = _Loading(target, folder, name.add_to(queue.add_to(config)), tokenizer, model.verify_signature)
    if preload_only:
        worker = loading.load()
        say(f"loaded {_describe(worker)}")
        worker.close()
        return
    security = secrets.load()
    log.set_up(security.tokens)
    judge_exposure(listen.host, security, require_auth=secrets.require_auth)
    fronts = open_fronts(
        front.http,
        front.otlp_endpoint,
        worker_id=pool.worker_id,
        security=security,
        tls=read_tls(secrets.tls_cert, secrets.tls_key, secrets.tls_client_ca),
        require_auth=secrets.require_auth,
        stream_interval=interval,
        settings=http.read(front.http),
    )
    manager = pool.read(listen.host, security)
    server = ServerConfig(
        host=listen.host,
        port=listen.port,
        drain_timeout_s=shutdown.drain_timeout,
        max_message_bytes=read_message_bytes(messages.max_message_bytes),
        idle_timeout_s=shutdown.idle_timeout,
        security=security,
        stream_interval=interval,
    )
    _run(loading, server, fronts, manager)


@dataclass(slots=True)
class _Loading:
    """The load of a model.

    target: what was named. folder: its artifact, or None if it is a source. public_key: of who signed the
    folder, if that is to be checked. worker: what came of the load.
    """

    target: str
    folder: Path | None
    config: EngineConfig
    tokenizer: Path | None
    public_key: Path | None = None
    progress: LoadProgress = field(default_factory=LoadProgress)
    worker: AnyWorker | None = None

    def load(self) -> AnyWorker:
        """Load the model and warm it up, on a thread of its own while the port already answers."""
        from llorch_serve.loading.models import load_model
        from llorch_serve.terminal.opening import check_signed, open_any

        folder = self.folder or export_source(self.target, self.progress)
        signed = check_signed(folder, self.public_key)
        load_model(folder)  # whether its files are what they should be comes before reading gigabytes of them
        read_ahead(sorted(folder.iterdir()), self.progress)
        self.worker = open_any(folder, self.config, tokenizer=self.tokenizer, signed=signed)
        self.worker.warm_up()
        return self.worker


def _run(loading: _Loading, server: ServerConfig, fronts: ServingFronts, manager: PoolConfig | None) -> None:
    """Serve until the worker is told to stop; say where it listens, and when it is ready."""
    from llorch_serve.lifecycle.serving import serve
    from llorch_serve.pool.reporter import PoolReporter

    def say_ready(address: str) -> None:
        assert loading.worker is not None
        fronts.announce("worker.ready", address, f"serving {_describe(loading.worker)} at {address}")
        if is_wanted():
            info, url = loading.worker.model_info(), next(iter(fronts.urls), None)
            asks_token, embeds = bool(server.security.tokens), info.embedding_size > 0
            for line in Welcome(address, url, info.has_chat_template, asks_token, embeds).lines():
                say(line)

    asyncio.run(
        serve(
            lambda: fronts.observe(loading.load()),
            server,
            progress=loading.progress,
            fronts=fronts.fronts,
            companions=()
            if manager is None
            else (PoolReporter(manager, http_url=lambda: next(iter(fronts.urls), None)),),
            on_bound=lambda address: fronts.announce(
                "worker.listen", address, f"listening at {address}, loading"
            ),
            on_ready=say_ready,
        )
    )


def _describe(worker: AnyWorker) -> str:
    from llorch_serve.bench.resources import peak_rss_mib
    from llorch_serve.foreign.model import UNSTATED

    info = worker.model_info()
    made = info.kind if info.precision == UNSTATED else info.precision
    room = f"with {info.slots} slots of {info.context_length} tokens"
    if info.embedding_size:
        room = f"embedding texts of up to {info.context_length} tokens"
    return (
        f"{info.model_id} ({worker.artifact.folder}, {made}) on {info.provider} {room}, "
        f"{peak_rss_mib():.0f} MiB"
    )
