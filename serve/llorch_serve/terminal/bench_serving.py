"""The serving half of ``llorch bench``: a running worker under load, over gRPC or its HTTP front.

Input: flags. Output: a report with one entry, the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from llorch_serve.bench.schema import Report, Row, ServingTest
from llorch_serve.bench.serving.load import Call
from llorch_serve.bench.serving.measure import measure
from llorch_serve.bench.serving.over_grpc import GrpcCall
from llorch_serve.bench.serving.work import Job, Lengths, drawn_jobs, listed_jobs, read_dataset
from llorch_serve.bench.worker_report import report_on_worker
from llorch_serve.bench.workload import text_prompt
from llorch_serve.client.asynchronous import AsyncWorkerClient
from llorch_serve.client.channel import Access
from llorch_serve.errors import UsageError
from llorch_serve.requests import ModelInfo
from llorch_serve.terminal.access import connected
from llorch_serve.terminal.bench_flags import LengthFlags
from llorch_serve.terminal.bench_streams import check_context
from llorch_serve.terminal.console import say, step_progress
from llorch_serve.terminal.load_flags import LoadFlags
from llorch_serve.terminal.load_plan import plan_load
from llorch_serve.terminal.requirements import required

_LATE_SHARE: Final = 0.05  # of the median time to the first token


def measure_worker(
    address: str, access: Access, wait: float | None, flags: LoadFlags, lengths: LengthFlags, repeat: int
) -> Report:
    """Put the worker at ``address`` (HOST:PORT, or http://HOST:PORT for its HTTP front) under load.

    Raises UsageError for flags that say nothing together or that this worker cannot follow, WorkerError if it
    cannot be reached or no request of a run succeeds.
    """
    http = "://" in address
    dataset = None if flags.dataset is None else read_dataset(flags.dataset)
    given = lengths.read()
    tokens = lengths.tokens if given is None else len(given)
    tests = plan_load(
        flags,
        lengths,
        prompt_tokens=None if dataset is not None else tokens,
        dataset=None if dataset is None else dataset.name,
        http=http,
    )
    worker = _over_http(address, access, wait) if http else _over_grpc(address, access, wait)
    spread, seed = tests[0].spread, tests[0].seed or 0
    prompts, answers = Lengths.around(tokens, spread), Lengths.around(lengths.max_tokens, spread)
    _check_slots(worker.info, tests)
    jobs: Iterator[Job]
    if dataset is not None:
        jobs = listed_jobs(dataset, lengths.max_tokens)
    else:
        check_context(prompts.high, answers.high, worker.info.context_length)
        ids = worker.prompt(prompts.high, seed) if given is None else given
        jobs = drawn_jobs(prompts, answers, ids, worker.info.vocab_size, seed)
    with step_progress("measuring", len(tests) * (repeat + 1)) as advance:
        rows = asyncio.run(_measure_all(worker, tests, jobs, repeat, advance))
    for row in rows:
        _say_if_late(row)
    return report_on_worker(worker.info, rows, repeat)


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker that answers. prompt: so many token ids, made with a seed. call: opens the way that requests
    go.
    """

    info: ModelInfo
    prompt: Callable[[int, int], tuple[int, ...]]
    call: Callable[[], AbstractAsyncContextManager[Call]]


def _over_grpc(address: str, access: Access, wait: float | None) -> _Worker:
    with connected(address, access, wait) as client:
        info = client.model_info()

    def prompt(count: int, _seed: int) -> tuple[int, ...]:
        with connected(address, access, None) as client:
            return text_prompt(count, client.tokenize)

    @asynccontextmanager
    async def call() -> AsyncGenerator[Call]:
        async with AsyncWorkerClient(address, access) as client:
            yield GrpcCall(client)

    return _Worker(info, prompt, call)


def _over_http(address: str, access: Access, wait: float | None) -> _Worker:
    with required("http"):
        from llorch_serve.bench.serving.over_http import HttpCall, fetch_model_info
        from llorch_serve.bench.serving.wire import read_address
    if wait:
        raise UsageError("--wait is for gRPC; over HTTP, wait until GET /health answers 200")
    if access.chain is not None:
        raise UsageError(
            "--tls-cert is not sent over HTTP; measure a worker that asks for certificates over gRPC"
        )
    where = read_address(address, ca=access.ca, token=access.token)
    info = asyncio.run(fetch_model_info(where))

    def prompt(count: int, seed: int) -> tuple[int, ...]:
        # There is no route that tokenises, so the prompt is no text.
        return tuple(map(int, np.random.default_rng(seed).integers(info.vocab_size, size=count)))

    @asynccontextmanager
    async def call() -> AsyncGenerator[Call]:
        yield HttpCall(where, info.model_id)

    return _Worker(info, prompt, call)


async def _measure_all(
    worker: _Worker,
    tests: Sequence[ServingTest],
    jobs: Iterator[Job],
    repeat: int,
    progress: Callable[[], None],
) -> tuple[Row, ...]:
    async with worker.call() as call:
        return tuple([await measure(test, call, jobs, repeat=repeat, progress=progress) for test in tests])


def _check_slots(info: ModelInfo, tests: Sequence[ServingTest]) -> None:
    most = max(test.concurrency or 0 for test in tests)
    if most > info.slots:
        say(
            f"note: the worker has {info.slots} slots; of {most} clients' requests the others wait their turn"
        )


def _say_if_late(row: Row) -> None:
    late = row.figures.get("late_p99_ms")
    if late is not None and late.median > _LATE_SHARE * row.figures["ttft_p50_ms"].median:
        say(
            f"note: this client itself sent requests up to {late.median:.0f} ms late (p99), which is part "
            f"of the latencies; "
            "run it on another machine than the worker, or at a lower rate"
        )
