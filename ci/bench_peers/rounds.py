"""Turns: every engine once in each round, in an order that drift of the machine treats alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TypeVar

from bench_peers.contestant import Contestant, Work
from bench_peers.ours import Recipe
from bench_peers.protocol import Measurement
from bench_peers.reuse import Gains

_Item = TypeVar("_Item")


def order(ours: Sequence[_Item], peers: Sequence[_Item], index: int) -> list[_Item]:
    """Return whose turn it is in round ``index``: ours and peers by turns, backwards in every other round."""
    pairs = zip_longest(ours, peers)
    turns = [one for pair in pairs for one in pair if one is not None]
    return turns[::-1] if index % 2 else turns


def run_rounds(
    ours: Sequence[Recipe],
    peers: Sequence[Contestant],
    gaining: Recipe,
    work: Work,
    count: int,
    step: Callable[[str], None],
) -> tuple[list[dict[str, list[Measurement]]], list[Gains]]:
    """Run ``count`` rounds; ``step`` is told before each turn whose it is.

    gaining: the recipe that shows what guesses and reuse gain, at the end of each round.
    Raises ResourceError or ProtocolError if a process fails: a round without one engine compares nothing.
    """
    rounds, gains = [], []
    everyone: tuple[Sequence[Contestant], Sequence[Contestant]] = (ours, peers)
    for index in range(count):
        found: dict[str, list[Measurement]] = {}
        for contestant in order(*everyone, index):
            step(f"round {index + 1} of {count}: {contestant.label}")
            found[contestant.label] = contestant.measure(work)
        step(f"round {index + 1} of {count}: {gaining.label} with guesses and reuse")
        gains.append(gaining.gains(work))
        rounds.append(found)
    return rounds, gains
