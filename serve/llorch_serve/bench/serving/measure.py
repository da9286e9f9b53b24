"""From a test to its row in the report: runs of load, and their figures by name.

Input: a :class:`llorch_serve.bench.schema.ServingTest`, how to call the worker, and the requests. Output: a
row. Each figure has one value a run; docs/bench-serving.md says what they mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Final

from llorch_serve.bench.schema import Better, Failure, Row, ServingTest, figure
from llorch_serve.bench.serving.arrivals import Arrivals, ClosedLoop, OpenLoop
from llorch_serve.bench.serving.figures import Failures, ServingFigures, Summary, compute_figures
from llorch_serve.bench.serving.load import Call, LoadGenerator
from llorch_serve.bench.serving.work import Job
from llorch_serve.errors import WorkerError

_PLAIN: Final[dict[str, tuple[str, Better | None]]] = {
    "requests_per_s": ("requests/s", "higher"),
    "output_tokens_per_s": ("tokens/s", "higher"),
    "total_tokens_per_s": ("tokens/s", "higher"),
    "failed": ("requests", "lower"),
    "succeeded": ("requests", None),
    "duration_s": ("s", None),
    "peak_in_flight": ("requests", None),
    "prompt_tokens": ("tokens", None),
    "cached_tokens": ("tokens", None),
    "generated_tokens": ("tokens", None),
}
_SUMMARIES: Final[dict[str, Better | None]] = {
    "ttft": "lower",
    "tpot": "lower",
    "itl": "lower",
    "gap": "lower",
    "e2e": "lower",
    "late": None,  # the client's own, and no property of the worker
}
_GOODPUT: Final[dict[str, tuple[str, Better]]] = {
    "requests_per_s": ("requests/s", "higher"),
    "tokens_per_s": ("tokens/s", "higher"),
    "share": ("of requests", "higher"),
}


async def measure(
    test: ServingTest,
    call: Call,
    jobs: Iterator[Job],
    *,
    repeat: int,
    progress: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Row:
    """Send one request to warm up, then run ``test`` ``repeat`` times; ``jobs`` go on from run to run.

    An open loop's moments are drawn anew for each run, so that its figures show their spread, too.
    ``progress`` is called after the first request and after each run. Raises WorkerError if a run has no
    whole answer, with the statuses that it had instead.
    """
    generator = LoadGenerator(call, clock)
    await generator.run(ClosedLoop(1), jobs, requests=1, duration_s=None)
    progress()
    runs = []
    for number in range(repeat):
        arrivals = _arrivals(test, number)
        run = await generator.run(arrivals, jobs, requests=test.requests, duration_s=test.duration_s)
        progress()
        if not run.records:
            raise WorkerError("no request was due within the run; allow it more time, or a higher rate")
        found = compute_figures(run, limits_ms=test.limits_ms or None, open_loop=test.arrivals == "open")
        if not found.succeeded:
            raise WorkerError(f"no request succeeded: {_described(found.failures)}")
        runs.append(found)
    return Row(
        test=test, figures={name: figure(*how) for name, how in _named(runs)}, failures=_failures(runs)
    )


def _arrivals(test: ServingTest, number: int) -> Arrivals:
    if test.arrivals == "open":
        assert test.rate_per_s is not None
        assert test.burstiness is not None
        assert test.seed is not None
        return OpenLoop(test.rate_per_s, test.burstiness, test.seed + number)
    assert test.concurrency is not None
    return ClosedLoop(test.concurrency)


def _described(failures: dict[str, Failures]) -> str:
    return "; ".join(f"{found.requests} {status} ({found.example})" for status, found in failures.items())


def _named(runs: Sequence[ServingFigures]) -> Iterator[tuple[str, tuple[list[float], str, Better | None]]]:
    """Yield name, values, unit and direction of every figure that all runs have."""
    for name, (unit, better) in _PLAIN.items():
        yield name, ([getattr(run, name) for run in runs], unit, better)
    for name, direction in _SUMMARIES.items():
        summaries: list[Summary | None] = [getattr(run, f"{name}_ms") for run in runs]
        known = [summary for summary in summaries if summary is not None]
        if len(known) == len(runs):
            for part in fields(Summary):
                yield f"{name}_{part.name}_ms", ([getattr(one, part.name) for one in known], "ms", direction)
    for name, (unit, higher) in _GOODPUT.items():
        goodputs = [run.goodput for run in runs if run.goodput is not None]
        if goodputs:
            yield f"good_{name}", ([getattr(one, name) for one in goodputs], unit, higher)


def _failures(runs: Iterable[ServingFigures]) -> tuple[Failure, ...]:
    """Return the failures of all runs together, by status."""
    together: dict[str, list[Failures]] = {}
    for run in runs:
        for status, found in run.failures.items():
            together.setdefault(status, []).append(found)
    return tuple(
        Failure(
            status=status,
            requests=sum(one.requests for one in found),
            after_first_token=sum(one.after_first_token for one in found),
            tokens=sum(one.tokens for one in found),
            example=found[0].example,
        )
        for status, found in together.items()
    )
