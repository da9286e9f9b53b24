"""``llorch bench``: tokens per second of an artifact in this process, or of a running worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.errors import UsageError
from llorch_serve.providers.placement import describe_shares
from llorch_serve.terminal.access import TlsCa, TlsCert, TlsKey, Token, read_access, refuse_access
from llorch_serve.terminal.console import say, write, write_json
from llorch_serve.terminal.flags import (
    BatchInvariant,
    Connect,
    KvCacheDtype,
    MaxContext,
    Model,
    ModelDir,
    SingleGraph,
    Threads,
    Wait,
)
from llorch_serve.terminal.target import (
    find_target,
    find_tokenizer,
    refuse_local_flags,
    refuse_wait,
    resolve_artifact,
)

if TYPE_CHECKING:
    from llorch_serve.artifact import Artifact
    from llorch_serve.bench.measure import Backend, Figures
    from llorch_serve.bench.workload import Workload
    from llorch_serve.channel import Access
    from llorch_serve.reference_file import Fidelity
    from llorch_serve.requests import ModelInfo, Prompt

_PROMPT_TOKENS: Final = 512


def command(
    model_dir: ModelDir = None,
    model: Model = None,
    connect: Connect = None,
    wait: Wait = None,
    token: Token = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Tokens of each stream's prompt. Default: 512.", show_default=False)
    ] = None,
    prompt_ids: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A JSON array of token ids to use as prompt.", show_default=False),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens that each stream generates.")] = 128,
    streams: Annotated[
        str, typer.Option(metavar="1,8", help="Numbers of streams that start together.")
    ] = "1,8",
    repeat: Annotated[
        int, typer.Option(min=1, help="Counted runs after one warm-up; medians are shown.")
    ] = 3,
    max_context: MaxContext = None,
    kv_dtype: KvCacheDtype = None,
    single_graph: SingleGraph = False,
    batch_invariant: BatchInvariant = False,
    threads: Threads = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also measure fidelity, against a file made by llorch verify --write-reference.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of a table.")
    ] = False,
) -> None:
    """Measure prefill and decode speed, greedy, with stop tokens ignored.

    Prefill: all prompt tokens over the time until every stream has its first token. Decode: all later tokens over
    the time from there. Speed says nothing about fidelity: --reference puts its figure beside it.

    For example:

        llorch bench artifacts/smollm2

        llorch bench artifacts/smollm2 --reference smollm2.reference

        llorch bench --connect 127.0.0.1:50051 --streams 1,8,32 --json

    """
    counts = _read_streams(streams)
    if prompt_tokens is not None and prompt_ids is not None:
        raise UsageError("--prompt-ids and --prompt-tokens both name the prompt; give one of them")
    source = _Prompt(_PROMPT_TOKENS if prompt_tokens is None else prompt_tokens, prompt_ids)
    if connect is not None:
        refuse_local_flags(
            connect,
            {
                "DIR": model_dir,
                "--model": model,
                "--max-context": max_context,
                "--kv-dtype": kv_dtype,
                "--single-graph": single_graph,
                "--batch-invariant": batch_invariant,
                "--threads": threads,
                "--reference": reference,
            },
        )
        access = read_access(token, tls_ca, tls_cert, tls_key)
        _remote(connect, access, wait, counts, source, max_tokens, repeat, as_json)
        return
    refuse_wait(wait)
    refuse_access(token, tls_ca, tls_cert, tls_key)
    folder = resolve_artifact(find_target(model_dir, model))
    session = SessionConfig(
        threads=threads,
        slots=max(counts),
        max_context=max_context,
        kv_dtype=kv_dtype,
        single_graph=single_graph,
        batch_invariant=batch_invariant,
    )
    _local(folder, EngineConfig(session=session), counts, source, max_tokens, repeat, reference, as_json)


@dataclass(frozen=True, slots=True)
class _Prompt:
    tokens: int
    file: Path | None

    def workload(
        self, max_tokens: int, vocab_size: int, tokenize: Callable[[Prompt], tuple[tuple[int, ...], str]]
    ) -> Workload:
        from llorch_serve.bench.workload import Workload, read_prompt, text_prompt

        ids = text_prompt(self.tokens, tokenize) if self.file is None else read_prompt(self.file)
        return Workload(ids, max_tokens, vocab_size)


def _read_streams(value: str) -> list[int]:
    try:
        counts = [int(part) for part in value.split(",")]
    except ValueError as error:
        raise UsageError(f"--streams is {value!r}; expected numbers separated by commas, like 1,8") from error
    if not counts or min(counts) < 1:
        raise UsageError(f"--streams is {value!r}; every number must be at least 1")
    return counts


def _local(
    folder: Path,
    config: EngineConfig,
    counts: list[int],
    source: _Prompt,
    max_tokens: int,
    repeat: int,
    reference: Path | None,
    as_json: bool,
) -> None:
    from llorch_serve.artifact import is_artifact, load_artifact
    from llorch_serve.bench.measure import LocalBackend
    from llorch_serve.bench.report import SCHEMA_VERSION, Report, peak_rss_mib
    from llorch_serve.foreign.detect import foreign_kind
    from llorch_serve.reference_file import check_reference, read_reference
    from llorch_serve.terminal.opening import open_worker

    artifact: Artifact | None = None
    if reference is not None:  # before minutes are spent on measuring
        kind = None if is_artifact(folder) else foreign_kind(folder)
        if kind is not None:
            raise UsageError(
                f"--reference is for llorch's own artifacts and {folder} was made by {kind.value}; leave it out"
            )
        artifact = load_artifact(folder)
        check_reference(read_reference(reference), artifact)
    started = time.perf_counter()
    worker = open_worker(folder, config, tokenizer=find_tokenizer())
    load_s = time.perf_counter() - started
    try:
        work = source.workload(max_tokens, worker.model_info().vocab_size, worker.tokenize)
        _check_context(work, worker.model_info().context_length)
        results = _measure_all(LocalBackend(worker), work, counts, repeat)
    finally:
        worker.close()
    info, peak = worker.model_info(), peak_rss_mib()
    recipe = worker.artifact.manifest.recipe
    described = _described(info) | {
        "block_size": recipe.block_size,
        "rules": len(recipe.rules) or None,
        "compute_type": recipe.compute_type,
    }
    fidelity = None
    if reference is not None and artifact is not None:
        fidelity = _fidelity(reference, artifact, config.session)
    _show(Report(SCHEMA_VERSION, described, info.provider, load_s, peak, results, fidelity), as_json)


def _described(info: ModelInfo) -> dict[str, object]:
    """Return how the model was made, and what it cannot do if there is anything."""
    return {
        "kind": info.kind or None,  # an older worker does not say
        "precision": info.precision,
        "head_precision": info.head_precision,
        "limits": "; ".join(info.limits) or None,
        "placement": describe_shares(info.provider_shares) or None,
    }


def _fidelity(path: Path, artifact: Artifact, measured: SessionConfig) -> Fidelity:
    """Compare on a session of its own, since the worker that was measured has been closed."""
    from llorch_serve.reference_file import divergence, read_reference
    from llorch_serve.session import open_session

    reference = read_reference(path)
    config = replace(measured, slots=1, max_context=max(len(reference.header.token_ids), 2))
    return divergence(open_session(artifact, config, lambda report: None), reference)


def _remote(
    address: str,
    access: Access,
    wait: float | None,
    counts: list[int],
    source: _Prompt,
    max_tokens: int,
    repeat: int,
    as_json: bool,
) -> None:
    from llorch_serve.bench.measure import RemoteBackend
    from llorch_serve.bench.report import SCHEMA_VERSION, Report
    from llorch_serve.client import WorkerClient

    with WorkerClient(address, access) as client:
        if wait:
            client.wait_until_ready(wait)
        info = client.model_info()
        if max(counts) > info.slots:
            say(
                f"note: the worker has {info.slots} slots; of {max(counts)} streams the others wait their turn"
            )
        work = source.workload(max_tokens, info.vocab_size, client.tokenize)
        _check_context(work, info.context_length)
        results = _measure_all(RemoteBackend(client.generate), work, counts, repeat)
    _show(Report(SCHEMA_VERSION, _described(info), info.provider, None, None, results), as_json)


def _check_context(work: Workload, context: int) -> None:
    needed = len(work.prompt_ids) + work.max_tokens
    if needed > context:
        raise UsageError(
            f"{len(work.prompt_ids)} prompt tokens and {work.max_tokens} generated ones need a context of {needed}; "
            f"this one has {context}. Choose fewer tokens."
        )


def _measure_all(backend: Backend, work: Workload, counts: list[int], repeat: int) -> list[Figures]:
    from llorch_serve.bench.measure import measure
    from llorch_serve.terminal.console import step_progress

    with step_progress("measuring", len(counts) * (repeat + 1)) as advance:
        return [measure(backend, work, count, repeat=repeat, progress=advance) for count in counts]


def _show(report: object, as_json: bool) -> None:
    from llorch_serve.bench.report import Report, table

    assert isinstance(report, Report)
    if as_json:
        write_json(report)
    else:
        write(table(report))
