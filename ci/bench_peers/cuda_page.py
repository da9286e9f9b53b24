"""What ``ci/bench-cuda`` found, and the page that tells of it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench_peers.contestant import Closeness
from bench_peers.machine import describe
from bench_peers.markdown import show_closeness, show_median, table
from bench_peers.protocol import Measurement
from bench_peers.results import Machine
from bench_peers.turns import speeds


@dataclass(slots=True)
class Result:
    """What one engine gave with one model. measured: every round's. problem: why there is no more; None: it
    ran to the end.
    """

    label: str
    made: str = ""
    closeness: Closeness | None = None
    measured: list[Measurement] = field(default_factory=list)
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ModelResults:
    """One model's. streams: the numbers that were asked for."""

    name: str
    streams: list[int]
    rounds: int
    results: list[Result]


def page(found: Sequence[ModelResults], card: str, machine: Machine, absent: Sequence[str]) -> str:
    """Return Markdown: a table for each model, then who is missing. card: the GPU, in words.

    absent: peers that did not install.
    """
    head = (
        f"{datetime.datetime.now(datetime.UTC).date().isoformat()}, `ci/bench-cuda`: {card}; "
        f"{describe(machine)}, {machine.system}, load before {machine.load:.2f}. Medians of the rounds; "
        "first tokens: milliseconds until every stream has its first one."
    )
    missing = [f"- {name} did not install here." for name in absent]
    return "\n\n".join([head, *map(_section, found), *(["\n".join(missing)] if missing else [])]) + "\n"


def _section(model: ModelResults) -> str:
    header = ["", "KL, nats", "top-1"]
    for count in model.streams:
        header += [f"{count}: first tokens, ms", f"{count}: decode, tokens/s"]
    ran = [result for result in model.results if result.measured]
    rows = [_row(result, model.streams) for result in ran]
    notes = [f"- {result.label}: {_note(result)}" for result in model.results]
    sizes = sorted({(one.prompt_tokens, one.new_tokens) for result in ran for one in result.measured})
    asked = "".join(f" {prompt} prompt tokens and {new} greedy ones a stream." for prompt, new in sizes)
    rounds = f"{model.rounds} round{'' if model.rounds == 1 else 's'}"
    parts = [f"## {model.name}", f"{rounds}.{asked}", table(header, rows), "\n".join(notes)]
    return "\n\n".join(parts)


def _row(result: Result, streams: Sequence[int]) -> list[str]:
    close = result.closeness
    cells = [result.label, *(("", "") if close is None else show_closeness(close))]
    for count in streams:
        at = [one for one in result.measured if one.streams == count]
        firsts = [
            1000 * count * one.prompt_tokens / one.prefill_tokens_per_s
            for one in at
            if one.prefill_tokens_per_s is not None
        ]
        cells += [show_median(firsts), show_median(speeds(at, "decode", count))]
    return cells


def _note(result: Result) -> str:
    versions = sorted({f"{one.engine} {one.version}" for one in result.measured})
    problem = "" if result.problem is None else f"**not to the end**: {result.problem}"
    return "; ".join(filter(None, (result.made, *versions, problem)))
