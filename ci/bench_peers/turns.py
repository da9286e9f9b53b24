"""Rounds in which every engine has one turn, and lines of tables about them: what the smaller benches share.

Input are contestants and their work; output are measurements by label, and Markdown.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from bench_peers.contestant import Contestant, Work
from bench_peers.machine import describe
from bench_peers.markdown import show_holds, show_median, show_ratio, table
from bench_peers.protocol import Measurement
from bench_peers.results import Machine, Ratio, ratio

Measurements = dict[str, list[Measurement]]
"""Those of all rounds, by the engine's label."""

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Match:
    """Two engines to compare, by label. at_least: the ratio of decode speeds that is asked; None: none."""

    name: str
    ours: str
    theirs: str
    at_least: float | None = None


def order(everyone: Sequence[_Item], index: int) -> list[_Item]:
    """Return whose turn it is in round ``index``: every other one runs backwards, so that drift of the
    machine treats all alike.
    """
    return list(everyone[::-1] if index % 2 else everyone)


def by_turns(
    everyone: Sequence[Contestant], work: Work, count: int, step: Callable[[str], None]
) -> Measurements:
    """Run ``count`` rounds; ``step`` is told before each turn whose it is.

    Raises ResourceError or ProtocolError if a process fails.
    """
    found: Measurements = {one.label: [] for one in everyone}
    for index in range(count):
        for one in order(everyone, index):
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
    return (*map(show_median, series), "" if peak is None else f"{peak:.0f}")


def ratios(matches: Sequence[Match], found: Measurements) -> str:
    """Return the table of ratios of ours to others', decode and prefill of one stream."""
    rows = []
    for match in matches:
        for name in ("decode", "prefill"):
            one = ratio(*(speeds(found[label], name) for label in (match.ours, match.theirs)))
            rows.append((f"{name}, {match.name}", *judged(one, match.at_least if name == "decode" else None)))
    return table(("", "asked", "measured", "holds"), rows)


def judged(found: Ratio | None, at_least: float | None) -> tuple[str, str, str]:
    """Return cells: what was asked, what was measured, and whether it holds.

    found: None: it could not be measured. at_least: None: nothing was asked.
    """
    measured = "not measured" if found is None else show_ratio(found)
    if at_least is None:
        return "", measured, ""
    return f">= {at_least}", measured, show_holds(found is not None and found.value >= at_least)


def place(script: str, machine: Machine, found: Measurements) -> str:
    """Return when and where it was, and what ran."""
    versions = sorted({f"{one.engine} {one.version}" for of in found.values() for one in of})
    return (
        f"{datetime.datetime.now(datetime.UTC).date().isoformat()}, `{script}`: {describe(machine)}; "
        f"load before {machine.load:.2f}; {'; '.join(versions)}."
    )


def conditions(script: str, machine: Machine, work: Work, found: Measurements) -> str:
    """Return when and where it was, what ran, and with how many tokens."""
    streams = " and ".join(map(str, work.streams))
    return (
        f"{place(script, machine, found)} "
        f"{len(work.prompt_ids)} prompt tokens and {work.new_tokens} greedy tokens, {streams} "
        f"stream{'' if streams == '1' else 's'}, {work.threads} threads, "
        f"{len(speeds(next(iter(found.values())), 'decode'))} rounds."
    )
