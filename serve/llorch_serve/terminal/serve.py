"""``llorch serve``: a gRPC worker for one artifact."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Protocol

import typer

from llorch_serve.config import EngineConfig
from llorch_serve.errors import UsageError
from llorch_serve.loading.progress import LoadProgress, read_ahead
from llorch_serve.terminal.console import say
from llorch_serve.terminal.file_flags import FileFlags
from llorch_serve.terminal.greeting import Welcome, is_wanted
from llorch_serve.terminal.groups import composed, given, only
from llorch_serve.terminal.http_flags import HttpFlags
from llorch_serve.terminal.replica_flags import ReplicaFlags, refuse_in_cluster
from llorch_serve.terminal.security_flags import SecurityFlags, judge_exposure
from llorch_serve.terminal.serve_replicas import beside, there
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
from llorch_serve.terminal.session_flags import (
    EngineFlags,
    HugePages,
    ProviderFlags,
    SessionFlags,
    ShareWeights,
)
from llorch_serve.terminal.target import ModelFlags, export_source, find_artifact, find_tokenizer

if TYPE_CHECKING:
    from llorch_serve.calls.interfaces import ClosableGenerator, Companion
    from llorch_serve.loading.worker import AnyWorker
    from llorch_serve.pool.reporter import PoolConfig
    from llorch_serve.requests import ModelInfo
    from llorch_serve.rpc.server import ServerConfig
    from llorch_serve.terminal.serving_fronts import ServingFronts


_SLOTS: Final = 8


@composed
def command(
    model: ModelFlags,
    listen: ListenFlags,
    slots: Annotated[int, typer.Option(help="Sequences that run at once; others wait.")] = _SLOTS,
    *,
    elsewhere: ReplicaFlags,
    session: SessionFlags,
    huge_pages: HugePages = None,
    share_weights: ShareWeights = False,
    engine: Annotated[
        EngineFlags,
        only(
            "no_prefix_cache",
            "strict_reuse",
            "prefill_chunk",
            "lookup",
            "draft",
            "tool_format",
            "reasoning_format",
            "rank_format",
        ),
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
    files: FileFlags,
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

        llorch serve artifacts/smollm2 --http 8080 --batch-folder batches

        llorch serve artifacts/smollm2 --replicas 1:4 --threads 2

        llorch serve --cluster 10.0.0.5:6379 --model smollm2 --http 8080

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
    head = elsewhere.head()
    loading: Loading
    if head is None:
        config = engine.config(
            session.config(provider, slots=slots, huge_pages=huge_pages, share_weights=share_weights)
        )
        loading = _here(
            model, name.add_to(config), elsewhere, queue, front.otlp_endpoint, preload_only=preload_only
        )
    else:
        own = given(
            huge_pages=huge_pages,
            share_weights=share_weights,
            preload_only=preload_only,
            slots=None if slots == _SLOTS else slots,
        )
        kinds = (session, engine, provider, name, queue)
        refuse_in_cluster(own, *(kind.given() for kind in kinds))
        loading = there(head, model, resume_streams=elsewhere.resume_streams)
    if preload_only:
        worker = loading.load()
        say(f"loaded {loading.describe()}")
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
        settings=http.read(front.http, files.read(front.http)),
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


class Loading(Protocol):
    """The load of a model, here or elsewhere."""

    @property
    def progress(self) -> LoadProgress:
        """How far it is."""

    def prepare(self) -> None:
        """Do what comes before anything listens."""

    def load(self) -> ClosableGenerator:
        """Make the model answer, on a thread of its own while the port already does."""

    def companions(self) -> tuple[Companion, ...]:
        """Return what runs beside the server as long as it serves."""

    def info(self) -> ModelInfo:
        """Describe what has been loaded."""

    def describe(self) -> str:
        """Say what has been loaded, in a phrase."""

    def close(self) -> None:
        """Free what the load has taken beside the model."""


@dataclass(slots=True)
class _Loading:
    """The load of a model into this process.

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

    def prepare(self) -> None:
        """Have nothing to do: the port is bound at once."""

    def load(self) -> AnyWorker:
        """Load the model and warm it up."""
        from llorch_serve.loading.models import load_model
        from llorch_serve.terminal.opening import check_signed, open_any

        folder = self.folder or export_source(self.target, self.progress)
        signed = check_signed(folder, self.public_key, self.config.draft)
        load_model(folder)  # whether its files are what they should be comes before reading gigabytes of them
        read_ahead(sorted(folder.iterdir()), self.progress)
        self.worker = open_any(folder, self.config, tokenizer=self.tokenizer, signed=signed)
        self.worker.warm_up()
        return self.worker

    def companions(self) -> tuple[Companion, ...]:
        """Return none: the engine tells by itself when it dies."""
        return ()

    def info(self) -> ModelInfo:
        """Describe the model."""
        assert self.worker is not None
        return self.worker.model_info()

    def describe(self) -> str:
        """Say what has been loaded, and what that takes."""
        from llorch_serve.bench.resources import peak_rss_mib
        from llorch_serve.foreign.model import UNSTATED

        assert self.worker is not None
        info = self.info()
        made = info.kind if info.precision == UNSTATED else info.precision
        room = f"with {info.slots} slots of {info.context_length} tokens"
        if info.embedding_size:
            room = f"embedding texts of up to {info.context_length} tokens"
        return (
            f"{info.model_id} ({self.worker.artifact.folder}, {made}) on {info.provider} {room}, "
            f"{peak_rss_mib():.0f} MiB"
        )

    def close(self) -> None:
        """Have nothing to free: the server closes the worker."""


def _here(
    model: ModelFlags,
    config: EngineConfig,
    elsewhere: ReplicaFlags,
    queue: QueueFlags,
    otlp_endpoint: str | None,
    *,
    preload_only: bool,
) -> Loading:
    """Return the load of a model into this process, or into replicas on this machine."""
    target = model.target()
    folder, tokenizer = find_artifact(target), find_tokenizer()
    if elsewhere.replicas is None:
        return _Loading(target, folder, queue.add_to(config), tokenizer, model.verify_signature)
    if preload_only:
        raise UsageError("--preload-only has no effect with --replicas; leave one of them out")
    return beside(
        target,
        folder,
        config,
        elsewhere,
        queue,
        signed=model.verify_signature,
        tokenizer=tokenizer,
        otlp_endpoint=otlp_endpoint,
    )


def _run(loading: Loading, server: ServerConfig, fronts: ServingFronts, manager: PoolConfig | None) -> None:
    """Serve until the worker is told to stop; say where it listens, and when it is ready."""
    from llorch_serve.lifecycle.serving import serve
    from llorch_serve.pool.reporter import PoolReporter

    def say_ready(address: str) -> None:
        fronts.announce("worker.ready", address, f"serving {loading.describe()} at {address}")
        if is_wanted():
            info, url = loading.info(), fronts.url()
            asks_token, embeds = bool(server.security.tokens), info.embedding_size > 0
            for line in Welcome(address, url, info.has_chat_template, asks_token, embeds).lines():
                say(line)

    reporters = () if manager is None else (PoolReporter(manager, http_url=fronts.url),)
    try:
        loading.prepare()
        asyncio.run(
            serve(
                lambda: fronts.observe(loading.load()),
                server,
                progress=loading.progress,
                fronts=fronts.fronts,
                companions=(*loading.companions(), *reporters),
                on_bound=lambda address: fronts.announce(
                    "worker.listen", address, f"listening at {address}, loading"
                ),
                on_ready=say_ready,
            )
        )
    finally:
        loading.close()
