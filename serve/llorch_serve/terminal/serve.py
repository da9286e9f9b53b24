"""``llorch serve``: a gRPC worker for one artifact."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.errors import UsageError
from llorch_serve.observe.logs import LogFormat, LogLevel, set_up_logging
from llorch_serve.parsing.registry import AUTO
from llorch_serve.terminal.flags import (
    AllowCpuNodes,
    BatchInvariant,
    EpLibrary,
    Http,
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
from llorch_serve.terminal.target import find_target, find_tokenizer, resolve_artifact


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
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests may take to finish after SIGTERM.")
    ] = 30.0,
    http: Http = None,
    otlp_endpoint: OtlpEndpoint = None,
    log_format: LogFormatFlag = LogFormat.TEXT,
    log_level: LogLevelFlag = LogLevel.INFO,
) -> None:
    """Serve an artifact, or a folder of onnxruntime-genai or Optimum, over gRPC (llorch.v1.GenerationService, health, reflection), and HTTP if asked to, until SIGTERM.

    For example:

        llorch serve artifacts/smollm2

        llorch serve artifacts/smollm2 --port 0 --slots 16 --max-context 4096

        llorch serve artifacts/smollm2 --http 8080

        grpcurl -plaintext -d '{"input": {"text": "Once"}}' 127.0.0.1:50051 llorch.v1.GenerationService/Generate

    """
    from llorch_serve.rpc.server import ClosableGenerator, ServerConfig, serve
    from llorch_serve.terminal.beside import open_beside
    from llorch_serve.terminal.opening import open_worker
    from llorch_serve.worker import Worker

    if slots < 1:
        raise UsageError(f"--slots is {slots}; at least 1 is needed")
    set_up_logging(log_format, log_level)
    beside = open_beside(http, otlp_endpoint)
    folder = resolve_artifact(find_target(model_dir, model))
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
        provider=provider_choice(provider, provider_option, ep_library, allow_cpu_nodes=allow_cpu_nodes),
    )
    config = EngineConfig(
        session=session,
        prefix_cache=not no_prefix_cache,
        strict_reuse=strict_reuse,
        lookup=lookup,
        tool_format=tool_format,
        reasoning_format=reasoning_format,
    )
    server = ServerConfig(host=host, port=port, drain_timeout_s=drain_timeout)
    opened: list[Worker] = []

    def load() -> ClosableGenerator:
        worker = open_worker(folder, config, tokenizer=find_tokenizer())
        worker.warm_up()
        opened.append(worker)
        return beside.observe(worker)

    def ready(address: str) -> None:
        beside.announce("worker.ready", address, f"serving {_describe(opened[0], folder)} at {address}")

    asyncio.run(
        serve(
            load,
            server,
            fronts=beside.fronts,
            on_bound=lambda address: beside.announce(
                "worker.listen", address, f"listening at {address}, loading"
            ),
            on_ready=ready,
        )
    )


def _describe(worker: object, folder: Path) -> str:
    from llorch_serve.bench.report import peak_rss_mib
    from llorch_serve.foreign.model import UNSTATED
    from llorch_serve.worker import Worker

    assert isinstance(worker, Worker)
    info = worker.model_info()
    made = info.kind if info.precision == UNSTATED else info.precision
    return (
        f"{info.model_id} ({folder}, {made}) on {info.provider} with {info.slots} slots of "
        f"{info.context_length} tokens, {peak_rss_mib():.0f} MiB"
    )
