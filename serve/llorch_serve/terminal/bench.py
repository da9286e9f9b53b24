"""``llorch bench``: speed, memory and fidelity of models on providers, or the speed of a running worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from llorch_serve.config import SessionConfig
from llorch_serve.errors import UsageError
from llorch_serve.terminal.access import TlsCa, TlsCert, TlsKey, Token, read_access, refuse_access
from llorch_serve.terminal.console import say
from llorch_serve.terminal.flags import (
    AllowCpuNodes,
    BatchInvariant,
    Connect,
    EpLibrary,
    HugePages,
    KvCacheDtype,
    MaxContext,
    Model,
    ModelDir,
    SingleGraph,
    Threads,
    Wait,
)
from llorch_serve.terminal.load_flags import (
    Burstiness,
    Concurrency,
    Dataset,
    Duration,
    LengthFlags,
    LoadFlags,
    RequestRate,
    Requests,
    Seed,
    Slo,
    Spread,
)
from llorch_serve.terminal.target import refuse_local_flags, refuse_wait

if TYPE_CHECKING:
    from llorch_serve.bench.schema import Report
    from llorch_serve.client.channel import Access

_PROMPT_TOKENS: Final = 512
_TESTS: Final = "prefill,decode,mixed"


def command(
    model_dir: ModelDir = None,
    model: Model = None,
    provider: Annotated[
        list[str] | None,
        typer.Option(
            "--provider",
            metavar="NAME[@PYTHON][=DIR]",
            help="A provider, the interpreter that has it, and an artifact for it; may be repeated. Default: "
            "cpu, this one, DIR.",
            show_default=False,
        ),
    ] = None,
    provider_option: Annotated[
        list[str] | None,
        typer.Option(
            "--provider-option",
            metavar="[NAME:]KEY=VALUE",
            help="An option of a provider, named where there are several; may be repeated.",
            show_default=False,
        ),
    ] = None,
    ep_library: EpLibrary = None,
    allow_cpu_nodes: AllowCpuNodes = False,
    connect: Connect = None,
    wait: Wait = None,
    token: Token = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tests: Annotated[
        str | None,
        typer.Option(
            metavar=_TESTS,
            help="What is measured: prompts alone, answers alone, both in one. Default: all.",
            show_default=False,
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Tokens of each stream's prompt. Default: 512.", show_default=False)
    ] = None,
    prompt_ids: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A JSON array of token ids to use as prompt.", show_default=False),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens that each stream generates.")] = 128,
    depth: Annotated[
        str | None,
        typer.Option(
            metavar="0,512",
            help="Tokens that are in each stream's context before. Default: 0.",
            show_default=False,
        ),
    ] = None,
    streams: Annotated[
        str | None,
        typer.Option(
            metavar="1,8", help="Numbers of streams that start together. Default: 1,8.", show_default=False
        ),
    ] = None,
    concurrency: Concurrency = None,
    request_rate: RequestRate = None,
    burstiness: Burstiness = None,
    requests: Requests = None,
    duration: Duration = None,
    spread: Spread = None,
    dataset: Dataset = None,
    seed: Seed = None,
    slo: Slo = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Counted runs after one warm-up; medians are shown.")
    ] = 3,
    max_context: MaxContext = None,
    kv_dtype: KvCacheDtype = None,
    single_graph: SingleGraph = False,
    batch_invariant: BatchInvariant = False,
    huge_pages: HugePages = None,
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
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write every figure as CSV.", show_default=False)
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write tables in Markdown.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a page with plots, in one file.", show_default=False),
    ] = None,
) -> None:
    """Measure prefill and decode speed, greedy, with stop tokens ignored; several providers in rounds.

    Prefill: all prompt tokens over the time until every stream has its first token. Decode: all later tokens
    over the time from there. Speed says nothing about fidelity: --reference puts its figure beside it.
    docs/bench.md says more.

    For example:

        llorch bench artifacts/smollm2

        llorch bench artifacts/smollm2 --reference smollm2.reference --depth 0,2048

        llorch bench --provider cpu=artifacts/cpu --provider openvino@ov/bin/python=artifacts/ov
        --allow-cpu-nodes --html r.html

        llorch bench --connect 127.0.0.1:50051 --streams 1,8,32 --json

        llorch bench --connect 127.0.0.1:50051 --request-rate 2,4 --slo ttft:500 --slo tpot:50

        llorch bench compare before.json after.json --fail-under 0.95

    """
    from llorch_serve.terminal.bench_output import Outputs

    counts = _read_numbers("--streams", "1,8" if streams is None else streams, least=1)
    if prompt_tokens is not None and prompt_ids is not None:
        raise UsageError("--prompt-ids and --prompt-tokens both name the prompt; give one of them")
    outputs = Outputs(as_json=as_json, csv=csv, markdown=markdown, html=html)
    outputs.check()
    tokens = _PROMPT_TOKENS if prompt_tokens is None else prompt_tokens
    load = LoadFlags(
        concurrency, request_rate, burstiness, requests, duration, spread, dataset, seed, tuple(slo or ())
    )
    load.check(connect, streams)
    if connect is not None:
        refuse_local_flags(
            connect,
            {
                "DIR": model_dir,
                "--model": model,
                "--provider": provider,
                "--provider-option": provider_option,
                "--ep-library": ep_library,
                "--allow-cpu-nodes": allow_cpu_nodes,
                "--tests": tests,
                "--depth": depth,
                "--max-context": max_context,
                "--kv-dtype": kv_dtype,
                "--single-graph": single_graph,
                "--batch-invariant": batch_invariant,
                "--huge-pages": huge_pages,
                "--threads": threads,
                "--reference": reference,
            },
        )
        if load.given:
            from llorch_serve.terminal.bench_serving import measure_worker

            access = read_access(token, tls_ca, tls_cert, tls_key)
            lengths = LengthFlags(prompt_tokens, prompt_ids, max_tokens)
            outputs.show(measure_worker(connect, access, wait, load, lengths, repeat))
            return
        work = _Work(tokens, prompt_ids, max_tokens, counts, repeat)
        outputs.show(_remote(connect, read_access(token, tls_ca, tls_cert, tls_key), wait, work))
        return
    refuse_wait(wait)
    refuse_access(token, tls_ca, tls_cert, tls_key)
    from llorch_serve.terminal.bench_offline import Asked, measure_here

    asked = Asked(
        model_dir=model_dir,
        model=model,
        providers=provider or (),
        options=provider_option or (),
        library=ep_library,
        allow_cpu_nodes=allow_cpu_nodes,
        works=_TESTS if tests is None else tests,
        prompt_tokens=tokens,
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        depths=[0] if depth is None else _read_numbers("--depth", depth, least=0),
        streams=counts,
        repeat=repeat,
        session=SessionConfig(
            threads=threads,
            max_context=max_context,
            kv_dtype=kv_dtype,
            single_graph=single_graph,
            batch_invariant=batch_invariant,
            huge_pages=huge_pages,
        ),
        reference=reference,
    )
    outputs.show(measure_here(asked))


def _read_numbers(flag: str, value: str, *, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError as error:
        raise UsageError(f"{flag} is {value!r}; expected numbers separated by commas, like 1,8") from error
    if min(numbers) < least:
        raise UsageError(f"{flag} is {value!r}; every number must be at least {least}")
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{flag} is {value!r}; every number once is enough")
    return numbers


@dataclass(frozen=True, slots=True)
class _Work:
    """What a worker is asked for. prompt_ids: a file of them, which ``prompt_tokens`` of the sample text
    stand for otherwise.
    """

    prompt_tokens: int
    prompt_ids: Path | None
    max_tokens: int
    counts: list[int]
    repeat: int


def _remote(address: str, access: Access, wait: float | None, asked: _Work) -> Report:
    from llorch_serve.bench.measure import RemoteBackend, measure
    from llorch_serve.bench.offline import speeds, summarise
    from llorch_serve.bench.schema import Row, ServingTest
    from llorch_serve.bench.worker_report import report_on_worker
    from llorch_serve.bench.workload import Workload, read_prompt, text_prompt
    from llorch_serve.client.blocking import WorkerClient
    from llorch_serve.terminal.console import step_progress

    with WorkerClient(address, access) as client:
        if wait:
            client.wait_until_ready(wait)
        info = client.model_info()
        if max(asked.counts) > info.slots:
            say(
                f"note: the worker has {info.slots} slots; of {max(asked.counts)} streams the others wait "
                f"their turn"
            )
        if asked.prompt_ids is None:
            ids = text_prompt(asked.prompt_tokens, client.tokenize)
        else:
            ids = read_prompt(asked.prompt_ids)
        work = Workload(ids, asked.max_tokens, info.vocab_size)
        _check_context(len(ids), asked.max_tokens, info.context_length)
        rows = []
        with step_progress("measuring", len(asked.counts) * (asked.repeat + 1)) as advance:
            for count in asked.counts:
                runs = measure(
                    RemoteBackend(client.generate), work, count, repeat=asked.repeat, progress=advance
                )
                test = ServingTest(
                    arrivals="together",
                    prompt_tokens=len(ids),
                    generated_tokens=asked.max_tokens,
                    concurrency=count,
                )
                rows.append(Row(test=test, figures=summarise([speeds(run) for run in runs])))
    return report_on_worker(info, rows, asked.repeat)


def _check_context(prompt: int, answer: int, context: int) -> None:
    if prompt + answer > context:
        raise UsageError(
            f"{prompt} prompt tokens and {answer} generated ones need a context of {prompt + answer}; "
            f"this one has {context}. Choose fewer tokens."
        )
