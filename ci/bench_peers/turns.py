"""Rounds in which every engine has one turn, and lines of tables about them: what the smaller benches share.

Input are contestants and their work; output are measurements by label, and Markdown.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from bench_peers.contestant import Contestant, Work
from bench_peers.machine import describe
from bench_peers.markdown import show_ratio, table
from bench_peers.protocol import Measurement
from bench_peers.results import Machine, ratio

Rounds = dict[str, list[Measurement]]


@dataclass(frozen=True, slots=True)
class Match:
    """Two engines to compare, by label. at_least: the ratio of decode speeds that is asked; None: none."""

    name: str
    ours: str
    theirs: str
    at_least: float | None = None


def by_turns(everyone: Sequence[Contestant], work: Work, count: int, step: Callable[[str], None]) -> Rounds:
    """Run ``count`` rounds, every other one backwards; ``step`` is told before each turn whose it is.

    Raises ResourceError or ProtocolError if a process fails.
    """
    found: Rounds = {one.label: [] for one in everyone}
    for index in range(count):
        for one in everyone[::-1] if index % 2 else everyone:
            step(f"round {index + 1} of {count}: {one.label}")
            found[one.label] += one.measure(work)
    return found


def speeds(of: Sequence[Measurement], name: Literal["prefill", "decode"], streams: int = 1) -> list[float]:
    """Return tokens a second, one a round; none for prompts that were not timed."""
    found = [
        one.decode_tokens_per_s if name == "decode" else one.prefill_tokens_per_s
        for one in of
        if one.streams == streams
    ]
    return [speed for speed in found if speed is not None]


def medians(of: Sequence[Measurement], streams: Sequence[int]) -> tuple[str, ...]:
    """Return cells: prefill of one stream, decode of each number of streams, and peak memory."""
    peak = max((one.peak_mib for one in of if one.peak_mib is not None), default=None)
    series = [speeds(of, "prefill"), *(speeds(of, "decode", count) for count in streams)]
    cells = [f"{statistics.median(values):.1f}" if values else "" for values in series]
    return (*cells, "" if peak is None else f"{peak:.0f}")


def ratios(matches: Sequence[Match], found: Rounds) -> str:
    """Return the table of ratios of ours to others', decode and prefill of one stream."""
    rows = []
    for match in matches:
        for name in ("decode", "prefill"):
            one = ratio(*(speeds(found[label], name) for label in (match.ours, match.theirs)))
            limit = match.at_least if name == "decode" else None
            holds = "" if limit is None else "yes" if one.value >= limit else "**no**"
            asked = "" if limit is None else f">= {limit}"
            rows.append((f"{name}, {match.name}", asked, show_ratio(one), holds))
    return table(("", "asked", "measured", "holds"), rows)


def place(script: str, machine: Machine, found: Rounds) -> str:
    """Return when and where it was, and what ran."""
    versions = sorted({f"{one.engine} {one.version}" for of in found.values() for one in of})
    return (
        f"{datetime.datetime.now(datetime.UTC).date().isoformat()}, `{script}`: {describe(machine)}; "
        f"load before {machine.load:.2f}; {'; '.join(versions)}."
    )


def conditions(script: str, machine: Machine, work: Work, found: Rounds) -> str:
    """Return when and where it was, what ran, and with how many tokens."""
    streams = " and ".join(map(str, work.streams))
    return (
        f"{place(script, machine, found)} "
        f"{len(work.prompt_ids)} prompt tokens and {work.new_tokens} greedy tokens, {streams} "
        f"stream{'' if streams == '1' else 's'}, {work.threads} threads, "
        f"{len(speeds(next(iter(found.values())), 'decode'))} rounds."
    )
