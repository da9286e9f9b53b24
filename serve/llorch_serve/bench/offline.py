"""Tests of an engine in this process: what one does, and one run of it.

Every test runs whole requests through scheduler, model and sampler, so its figures are those of a worker
without network and text. A context that is filled already is made by a request for the same tokens before the
clock starts.
"""

from __future__ import annotations

import itertools
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal

from llorch_serve.bench.energy import EnergyMeter
from llorch_serve.bench.measure import Backend, Figures, StreamRecord, figures
from llorch_serve.bench.schema import Better, Figure, OfflineTest, figure
from llorch_serve.bench.workload import greedy_request
from llorch_serve.engine.load import StageTimes
from llorch_serve.engine.reuse import ROWS_LEFT, SHORTEST_REUSE
from llorch_serve.errors import UnsupportedError, UsageError
from llorch_serve.requests import GenerationRequest

Work = Literal["prefill", "decode", "mixed"]
WORKS: Final[tuple[Work, ...]] = ("prefill", "decode", "mixed")

QUANTITIES: Final[dict[str, tuple[str, Better]]] = {
    "prefill_tokens_per_s": ("tokens/s", "higher"),
    "decode_tokens_per_s": ("tokens/s", "higher"),
    "tokens_per_s": ("tokens/s", "higher"),
    "ttft_p50_ms": ("ms", "lower"),
    "ttft_p99_ms": ("ms", "lower"),
    "itl_p50_ms": ("ms", "lower"),
    "itl_p99_ms": ("ms", "lower"),
    "joules_per_token": ("J", "lower"),
}
"""What a run can give: name, and its unit and better direction. Of a model that is cut into stages also how
busy each was, see :func:`quantity`.
"""


_OF_WORK: Final[dict[Work, frozenset[str]]] = {
    "prefill": frozenset({"prefill_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "joules_per_token"}),
    "decode": frozenset({"decode_tokens_per_s", "itl_p50_ms", "itl_p99_ms", "joules_per_token"}),
    "mixed": frozenset(QUANTITIES),
}

DECODE_PROMPT: Final = ROWS_LEFT
"""Tokens of a decode test's prompt behind its depth: as few as are computed anew in any case."""


def plan_tests(
    works: Iterable[Work],
    *,
    prompt_tokens: int,
    generated_tokens: int,
    depths: Sequence[int],
    streams: Sequence[int],
) -> list[OfflineTest]:
    """Return the tests of every work at every depth and number of streams.

    Raises UsageError for numbers that cannot be measured.
    """
    if prompt_tokens < 1:
        raise UsageError(f"--prompt-tokens is {prompt_tokens}; at least 1 is needed")
    for depth in depths:
        if depth and depth < SHORTEST_REUSE:
            raise UsageError(
                f"--depth is {depth}; the engine takes a filled context up from {SHORTEST_REUSE} tokens on, "
                f"so choose 0 or "
                f"at least {SHORTEST_REUSE}"
            )
    if any(depths) and prompt_tokens < ROWS_LEFT:
        raise UsageError(
            f"the prompt has {prompt_tokens} tokens; behind a --depth at least {ROWS_LEFT} are needed"
        )
    lengths = {
        "prefill": (prompt_tokens, 1),
        "decode": (DECODE_PROMPT, generated_tokens),
        "mixed": (prompt_tokens, generated_tokens),
    }
    return [
        OfflineTest(
            work=work,
            prompt_tokens=lengths[work][0],
            generated_tokens=lengths[work][1],
            depth=depth,
            streams=count,
        )
        for work, depth, count in itertools.product(works, depths, streams)
    ]


def longest(tests: Iterable[OfflineTest]) -> int:
    """Return the tokens of the longest sequence in any of the tests."""
    return max(test.depth + test.prompt_tokens + test.generated_tokens for test in tests)


class Offline:
    """Runs tests on a backend.

    prompt_ids: the text of every prompt, repeated as often as a test needs. The first token of each prompt is
        another
    one, so that none starts from what the cache holds of an earlier test.
    stages: tells how long each stage has worked so far; of one graph, nothing.
    """

    def __init__(
        self,
        backend: Backend,
        prompt_ids: Sequence[int],
        vocab_size: int,
        meter: EnergyMeter,
        stages: Callable[[], Sequence[StageTimes]] = tuple,
    ) -> None:
        self._backend = backend
        self._ids = prompt_ids
        self._meter = meter
        self._stages = stages
        start = secrets.randbelow(vocab_size)
        self._first = (number % vocab_size for number in itertools.count(start))

    def run(self, test: OfflineTest) -> dict[str, float]:
        """Do the work once; return the quantities of :data:`QUANTITIES` that it gives.

        Raises the first error of any stream, UnsupportedError where the engine cannot start from a filled
        context.
        """
        firsts = [next(self._first) for _ in range(test.streams)]
        if test.depth:
            self._backend.run([self._request(first, test.depth, 1) for first in firsts])
        length = test.depth + test.prompt_tokens
        requests = [self._request(first, length, test.generated_tokens) for first in firsts]
        before = self._meter.read()
        worked, began = self._stages(), time.perf_counter()
        records = self._backend.run(requests)
        took = time.perf_counter() - began
        joules = self._meter.joules_since(before)
        _check_depth(test, records)
        return _quantities(test, records, joules) | _of_stages(worked, self._stages(), took)

    def _request(self, first: int, length: int, max_tokens: int) -> GenerationRequest:
        ids = (first, *itertools.islice(itertools.cycle(self._ids), 1, length))
        return greedy_request(str(uuid.uuid4()), ids, max_tokens)


def _of_stages(before: Sequence[StageTimes], after: Sequence[StageTimes], seconds: float) -> dict[str, float]:
    """Return how much of some time each stage was in calls, and calls of all lanes waited for it, in
    percent.
    """
    found = {}
    for number, (first, last) in enumerate(zip(before, after, strict=True)):
        found[f"stage_{number}_busy"] = 100 * (last.busy_s - first.busy_s) / seconds
        found[f"stage_{number}_waiting"] = 100 * (last.waiting_s - first.waiting_s) / seconds
    return found


def _check_depth(test: OfflineTest, records: Sequence[StreamRecord]) -> None:
    odd = next((record for record in records if record.cached_tokens != test.depth), None)
    if odd is not None:
        raise UnsupportedError(
            f"of a context of {test.depth} tokens this engine takes up {odd.cached_tokens}, so nothing can "
            f"be measured behind it; "
            "leave --depth out for this model, or allow it more memory"
        )


def _quantities(test: OfflineTest, records: Sequence[StreamRecord], joules: float | None) -> dict[str, float]:
    found = figures(records, prompt_tokens=test.prompt_tokens)
    tokens = test.streams * (test.prompt_tokens + test.generated_tokens)
    values = speeds(found) | {"tokens_per_s": tokens / max(record.arrivals[-1] for record in records)}
    if joules is not None:
        values["joules_per_token"] = joules / tokens
    wanted = _OF_WORK[test.work]
    return {name: values[name] for name in QUANTITIES if name in wanted and name in values}


def speeds(found: Figures) -> dict[str, float]:
    """Return what :class:`llorch_serve.bench.measure.Figures` says, by names of :data:`QUANTITIES`."""
    return {
        "prefill_tokens_per_s": found.prefill_tokens_per_s,
        "decode_tokens_per_s": found.decode_tokens_per_s,
        "ttft_p50_ms": found.ttft_ms.p50,
        "ttft_p99_ms": found.ttft_ms.p99,
        "itl_p50_ms": found.itl_ms.p50,
        "itl_p99_ms": found.itl_ms.p99,
    }


def quantity(name: str) -> tuple[str, Better | None]:
    """Return the unit of what a run gives, and its better direction where there is one."""
    if name in QUANTITIES:
        return QUANTITIES[name]
    return ("%", None)  # of the run's time, see :func:`_of_stages`


def summarise(runs: Sequence[dict[str, float]]) -> dict[str, Figure]:
    """Return the figures of runs of one test, which have the same quantities."""
    names = runs[0] if runs else {}
    return {name: figure([run[name] for run in runs], *quantity(name)) for name in names}
