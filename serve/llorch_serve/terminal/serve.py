"""``llorch serve``: a gRPC worker for one artifact."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llorch_serve.chat.parsing.registry import AUTO
from llorch_serve.config import CacheSharing, EngineConfig, SessionConfig
from llorch_serve.errors import UsageError
from llorch_serve.loading.progress import LoadProgress, read_ahead
from llorch_serve.observe.logs import LogFormat, LogLevel, set_up_logging
from llorch_serve.terminal.access import TOKEN_VARIABLE
from llorch_serve.terminal.console import say
from llorch_serve.terminal.flags import (
    AllowCpuNodes,
    BatchInvariant,
    EpLibrary,
    Http,
    HugePages,
    KvCacheDtype,
    KvCacheMemory,
    LogFormatFlag,
    LogLevelFlag,
    Lookup,
    MaxContext,
    Model,
    ModelDir,
    NoPrefixCache,
    OtlpEndpoint,
    Provider,
    ProviderOption,
    ReasoningFormat,
    SingleGraph,
    StrictReuse,
    Threads,
    ToolFormat,
    provider_choice,
    read_size,
    refuse_invariant_lookup,
    refuse_strict_reuse,
)
from llorch_serve.terminal.serving_flags import (
    AdvertiseHost,
    CacheSharingFlag,
    CallbackUrl,
    ClientCa,
    IdleTimeout,
    MaxMessageBytes,
    MaxQueuedRequests,
    MaxQueuedTokens,
    ModelRef,
    PreloadOnly,
    RequireAuth,
    ServerCert,
    ServerKey,
    StreamInterval,
    TokenFile,
    WorkerId,
    judge_exposure,
    read_message_bytes,
    read_pool,
    read_stream_interval,
)
from llorch_serve.terminal.target import export_source, find_artifact, find_target, find_tokenizer

if TYPE_CHECKING:
    from llorch_serve.calls.interfaces import ClosableGenerator
    from llorch_serve.worker.worker import Worker


def command(
    model_dir: ModelDir = None,
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address to listen on; loopback by default.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0 takes any free one, which is printed.")
    ] = 50051,
    slots: Annotated[int, typer.Option(help="Sequences that run at once; others wait.")] = 8,
    max_context: MaxContext = None,
    kv_cache_memory: KvCacheMemory = None,
    kv_dtype: KvCacheDtype = None,
    single_graph: SingleGraph = False,
    batch_invariant: BatchInvariant = False,
    huge_pages: HugePages = None,
    no_prefix_cache: NoPrefixCache = False,
    strict_reuse: StrictReuse = False,
    lookup: Lookup = 0,
    tool_format: ToolFormat = AUTO,
    reasoning_format: ReasoningFormat = AUTO,
    threads: Threads = None,
    provider: Provider = None,
    provider_option: ProviderOption = None,
    ep_library: EpLibrary = None,
    allow_cpu_nodes: AllowCpuNodes = False,
    max_queued_requests: MaxQueuedRequests = 1024,
    max_queued_tokens: MaxQueuedTokens = None,
    cache_sharing: CacheSharingFlag = CacheSharing.CALLER,
    max_message_bytes: MaxMessageBytes = "16MiB",
    stream_interval: StreamInterval = "auto",
    token_file: TokenFile = None,
    tls_cert: ServerCert = None,
    tls_key: ServerKey = None,
    tls_client_ca: ClientCa = None,
    require_auth: RequireAuth = False,
    worker_id: WorkerId = None,
    callback_url: CallbackUrl = None,
    advertise_host: AdvertiseHost = None,
    model_ref: ModelRef = None,
    idle_timeout: IdleTimeout = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests may take to finish after SIGTERM.")
    ] = 30.0,
    http: Http = None,
    otlp_endpoint: OtlpEndpoint = None,
    log_format: LogFormatFlag = LogFormat.TEXT,
    log_level: LogLevelFlag = LogLevel.INFO,
    preload_only: PreloadOnly = False,
) -> None:
    """Serve an artifact, or a folder of onnxruntime-genai or Optimum, over gRPC (llorch.v1.GenerationService,
    health, reflection), and HTTP if asked to, until SIGTERM.

    For example:

        llorch serve artifacts/smollm2

        llorch serve artifacts/smollm2 --port 0 --slots 16 --max-context 4096

        llorch serve artifacts/smollm2 --http 8080

        LLORCH_API_TOKEN=... llorch serve artifacts/smollm2 --host 0.0.0.0 --tls-cert cert.pem --tls-key
        key.pem

        grpcurl -plaintext -d '{"input": {"text": "Once"}}' 127.0.0.1:50051
        llorch.v1.GenerationService/Generate

    """
    from llorch_serve.lifecycle.serving import serve
    from llorch_serve.pool.reporter import PoolReporter
    from llorch_serve.rpc.security import load_security
    from llorch_serve.rpc.server import ServerConfig
    from llorch_serve.terminal.beside import open_beside, read_tls

    if slots < 1:
        raise UsageError(f"--slots is {slots}; at least 1 is needed")
    set_up_logging(log_format, log_level)
    spacing = read_stream_interval(stream_interval)
    target = find_target(model_dir, model)
    folder, tokenizer = find_artifact(target), find_tokenizer()
    refuse_invariant_lookup(batch_invariant=batch_invariant, lookup=lookup)
    refuse_strict_reuse(strict_reuse=strict_reuse, no_prefix_cache=no_prefix_cache)
    session = SessionConfig(
        threads=threads,
        slots=slots,
        max_context=max_context,
        kv_cache_bytes=read_size("--kv-cache-memory", kv_cache_memory),
        kv_dtype=kv_dtype,
        single_graph=single_graph,
        batch_invariant=batch_invariant,
        huge_pages=huge_pages,
        provider=provider_choice(provider, provider_option, ep_library, allow_cpu_nodes=allow_cpu_nodes),
    )
    config = EngineConfig(
        session=session,
        max_waiting=max_queued_requests,
        max_waiting_tokens=max_queued_tokens,
        prefix_cache=not no_prefix_cache,
        cache_sharing=cache_sharing,
        strict_reuse=strict_reuse,
        lookup=lookup,
        tool_format=tool_format,
        reasoning_format=reasoning_format,
    )
    progress = LoadProgress()

    def load() -> Worker:
        return _load(folder or export_source(target, progress), config, tokenizer, progress)

    if preload_only:
        worker = load()
        say(f"loaded {_describe(worker)}")
        worker.close()
        return
    security = load_security(
        token=os.environ.get(TOKEN_VARIABLE),
        token_file=token_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
    )
    set_up_logging(log_format, log_level, security.tokens)
    judge_exposure(host, security, require_auth=require_auth)
    beside = open_beside(
        http,
        otlp_endpoint,
        worker_id=worker_id,
        security=security,
        tls=read_tls(tls_cert, tls_key, tls_client_ca),
        require_auth=require_auth,
        stream_interval=spacing,
    )
    pool = read_pool(worker_id, callback_url, advertise_host, model_ref, host=host, security=security)
    server = ServerConfig(
        host=host,
        port=port,
        drain_timeout_s=drain_timeout,
        max_message_bytes=read_message_bytes(max_message_bytes),
        idle_timeout_s=idle_timeout,
        security=security,
        stream_interval=spacing,
    )
    opened: list[Worker] = []
    asyncio.run(
        serve(
            _kept(load, opened, beside.observe),
            server,
            progress=progress,
            fronts=beside.fronts,
            companions=() if pool is None else (PoolReporter(pool),),
            on_bound=lambda address: beside.announce(
                "worker.listen", address, f"listening at {address}, loading"
            ),
            on_ready=lambda address: beside.announce(
                "worker.ready", address, f"serving {_describe(opened[0])} at {address}"
            ),
        )
    )


def _load(folder: Path, config: EngineConfig, tokenizer: Path | None, progress: LoadProgress) -> Worker:
    """Load an artifact and warm it up. A thread of its own, while the port already answers."""
    from llorch_serve.loading.models import load_model
    from llorch_serve.terminal.opening import open_worker

    load_model(folder)  # whether its files are what they should be comes before reading gigabytes of them
    read_ahead(sorted(folder.iterdir()), progress)
    worker = open_worker(folder, config, tokenizer=tokenizer)
    worker.warm_up()
    return worker


def _kept(
    load: Callable[[], Worker],
    opened: list[Worker],
    observe: Callable[[ClosableGenerator], ClosableGenerator],
) -> Callable[[], ClosableGenerator]:
    def loading() -> ClosableGenerator:
        opened.append(load())
        return observe(opened[0])

    return loading


def _describe(worker: Worker) -> str:
    from llorch_serve.bench.resources import peak_rss_mib
    from llorch_serve.foreign.model import UNSTATED

    info = worker.model_info()
    made = info.kind if info.precision == UNSTATED else info.precision
    return (
        f"{info.model_id} ({worker.artifact.folder}, {made}) on {info.provider} with {info.slots} slots of "
        f"{info.context_length} tokens, {peak_rss_mib():.0f} MiB"
    )
