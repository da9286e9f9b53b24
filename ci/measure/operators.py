"""Where a prompt's time and a step's go, by operator of the runtime.

    ci/measurement operators ARTIFACT [PROMPT_TOKENS] [STREAMS] [CONTEXT]     # 512, 1 and 512

Runs the session alone with the runtime's profiler: a prompt in its usual chunks, and steps of so many streams
with that context each. Prints, for each of the two, milliseconds a token and the share of every operator,
medians over the repetitions. The profiler itself costs some microseconds a node.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import onnxruntime

from bench_peers.markdown import table
from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.loading.models import load_model, open_model

REPEAT = 5
STEPS = 12
LEAST = 0.005  # share of an operator that has a line of its own
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Costs:
    """What one prompt or one step took. operators: milliseconds by name. wall: milliseconds of all."""

    operators: dict[str, float]
    wall: float


@contextmanager
def profiled(folder: Path) -> Iterator[list[Any]]:
    """Have sessions that are made inside keep profiles in a folder; give these sessions."""
    made: list[Any] = []
    options, session = onnxruntime.SessionOptions, onnxruntime.InferenceSession

    def profiling() -> Any:
        chosen = options()
        chosen.enable_profiling = True
        chosen.profile_file_prefix = str(folder / f"graph{len(made)}")
        return chosen

    def kept(*arguments: Any, **named: Any) -> Any:
        made.append(session(*arguments, **named))
        return made[-1]

    with (
        mock.patch.object(onnxruntime, "SessionOptions", profiling),
        mock.patch.object(onnxruntime, "InferenceSession", kept),
    ):
        yield made


def nodes(profile: Path) -> Iterator[tuple[float, str, float]]:
    """Give each node's start in seconds of the profile's clock, operator and milliseconds."""
    for event in json.loads(profile.read_text(encoding="utf-8")):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            yield event["ts"] / 1e6, event["args"]["op_name"], event["dur"] / 1e3


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Do something; return when it began and ended, in seconds."""
    began = time.perf_counter()
    act()
    return began, time.perf_counter()


def costs(spans: Sequence[tuple[float, float]], found: Sequence[tuple[float, str, float]]) -> Costs:
    """Return what happened in some spans of time, medians over them."""
    totals: list[dict[str, float]] = []
    for began, ended in spans:
        total: dict[str, float] = defaultdict(float)
        for at, operator, took in found:
            if began <= at <= ended:
                total[operator] += took
        totals.append(total)
    names = {name for total in totals for name in total}
    medians = {name: statistics.median(total.get(name, 0.0) for total in totals) for name in names}
    return Costs(medians, statistics.median(1000 * (ended - began) for began, ended in spans))


def shown(title: str, found: Costs, tokens: int) -> str:
    """Return a table of operators, the costliest first; what no operator took is the rest."""
    operators = sorted(found.operators.items(), key=lambda one: -one[1])
    lines = [(name, took) for name, took in operators if took >= LEAST * found.wall]
    lines.append(("the rest", found.wall - sum(took for _, took in lines)))
    rows = [[name, f"{took / tokens:.3f}", f"{took / found.wall:.1%}"] for name, took in lines]
    return f"{title}: {found.wall:.1f} ms\n\n" + table(["operator", "ms a token", "share"], rows)


def main(artifact: Path, prompt_tokens: int = 512, streams: int = 1, context: int = 512) -> None:
    """Measure and print."""
    chunk = EngineConfig().prefill_chunk
    config = SessionConfig(slots=streams, max_context=max(prompt_tokens, context) + STEPS, huge_pages=None)
    with tempfile.TemporaryDirectory() as folder:
        with profiled(Path(folder)) as graphs:
            session = open_model(load_model(artifact), config, lambda report: None)

        def read(slot: int, tokens: int) -> None:
            for start in range(0, tokens, chunk):
                ids = [100 + i % 400 for i in range(start, min(start + chunk, tokens))]
                session.prefill(slot, ids, start)

        prompts = [timed(lambda: read(0, prompt_tokens)) for _ in range(REPEAT + 1)][1:]
        for slot in range(streams):
            read(slot, context)
        steps = [
            timed(lambda: session.decode([200] * streams, [context + 1] * streams)) for _ in range(STEPS)
        ][2:]
        found = []
        for graph in graphs:
            began = since(graph.get_profiling_start_time_ns() / 1e9)
            found += [(began + at, name, took) for at, name, took in nodes(Path(graph.end_profiling()))]
    print(shown(f"{prompt_tokens} tokens of a prompt", costs(prompts, found), prompt_tokens))  # noqa: T201 - a script's output
    title = f"a step of {streams} at {context} tokens"
    print("\n" + shown(title, costs(steps, found), streams))  # noqa: T201 - as above


def since(began: float) -> float:
    """Return a time of the runtime's clock as one of :func:`timed`'s, in seconds. The runtime counts by the
    date on some systems and by a steady clock on others.
    """
    by_date = abs(began - time.time()) < _DAY_S
    return began + time.perf_counter() - (time.time() if by_date else time.monotonic())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(argument) for argument in sys.argv[2:]))
