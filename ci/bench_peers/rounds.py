"""The rounds of ``ci/bench``: every engine has one turn in each, then what llorch gains over itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final, TypeVar

from bench_peers.contestant import Contestant, Work
from bench_peers.ours import Recipe
from bench_peers.protocol import Measurement
from bench_peers.reuse import Gains
from bench_peers.turns import order

OPENING: Final = "The capital of France is"
"""What a command continues whose first token is timed."""

_Item = TypeVar("_Item")


def alternated(ours: Sequence[_Item], peers: Sequence[_Item]) -> list[_Item]:
    """Return ours and peers by turns."""
    return [one for pair in zip_longest(ours, peers) for one in pair if one is not None]


@dataclass(frozen=True, slots=True)
class Rounds:
    """What was found, one of each list a round; the fields are those of :class:`bench_peers.results.Run`."""

    rounds: list[dict[str, list[Measurement]]] = field(default_factory=list)
    first_token_s: list[dict[str, float]] = field(default_factory=list)
    gains: list[Gains] = field(default_factory=list)


def run_rounds(
    ours: Sequence[Recipe],
    peers: Sequence[Contestant],
    gaining: Recipe,
    work: Work,
    count: int,
    step: Callable[[str], None],
) -> Rounds:
    """Run ``count`` rounds; ``step`` is told before each turn whose it is.

    gaining: the recipe that shows what guesses and reuse gain, at the end of each round.
    Raises ResourceError or ProtocolError if a process fails: a round without one engine compares nothing.
    """
    found = Rounds()
    everyone: list[Contestant] = alternated(ours, peers)
    for index in range(count):
        speeds: dict[str, list[Measurement]] = {}
        starts: dict[str, float] = {}
        for contestant in order(everyone, index):
            step(f"round {index + 1} of {count}: {contestant.label}")
            speeds[contestant.label] = contestant.measure(work)
            # The first has its files read from the disk, and compiled by Python where they are new.
            _, starts[contestant.label] = (contestant.first_token_s(OPENING, work.threads) for _ in range(2))
        step(f"round {index + 1} of {count}: {gaining.label} with guesses and reuse")
        found.gains.append(gaining.gains(work))
        found.rounds.append(speeds)
        found.first_token_s.append(starts)
    return found
