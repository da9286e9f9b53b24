"""What choosing a replica by prompts is worth, and what it costs, without Ray and without a model.

    ci/measurement cluster_routing

Prints the share of reusable tokens that replicas had cached, for conversations on simulated replicas whose
slots are the engine's own, beside the power of two choices; the same with several fronts, each of which knows
only what it has sent; and the processor time of a choice by the number of replicas.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from llorch_serve.cluster.choice import Candidate, Rules, choose
from llorch_serve.cluster.interfaces import RoutingHint
from llorch_serve.cluster.prefix_index import PrefixIndex, prefix_of
from support.fakes.simulated_replicas import (
    ByPowerOfTwo,
    ByPrefix,
    Route,
    SimulatedReplica,
    Simulation,
    conversations,
)

SEEDS = 20
TURNS = 4
PAUSES_S = (0.0, 0.5, 5.0)
SIZES = ((2, 4, 6), (4, 8, 24))  # replicas, slots of each, conversations
SLOTS = 8
PROMPT_TOKENS = 1000

MakeRoute = Callable[[Sequence[SimulatedReplica], int], Route]


class ByFronts:
    """Several fronts with an index of their own. sticky: a conversation stays with one."""

    def __init__(self, replicas: Sequence[SimulatedReplica], fronts: int, seed: int, *, sticky: bool) -> None:
        self._fronts = [ByPrefix(replicas) for _ in range(fronts)]
        self._random = random.Random(seed)
        self._stays: dict[str, ByPrefix] | None = {} if sticky else None

    def __call__(self, replicas: list[SimulatedReplica], prompt: list[int], session: str) -> SimulatedReplica:
        front = self._random.choice(self._fronts)
        if self._stays is not None:
            front = self._stays.setdefault(session, front)
        return front(replicas, prompt, session)


def share_cached(size: tuple[int, int, int], system: int, pause_s: float, make: MakeRoute) -> float:
    """Return the share of reusable tokens that were cached, over all seeds."""
    count, slots, talks = size
    reused = reusable = 0
    for seed in range(SEEDS):
        replicas = [SimulatedReplica(f"r{number}", slots) for number in range(count)]
        simulation = Simulation(replicas, make(replicas, seed), seed)
        simulation.run(conversations(talks, TURNS, system=system, seed=seed), longest_pause_s=pause_s)
        reused += simulation.reused
        reusable += simulation.reusable
    return reused / reusable


def choice_ms(count: int, system: int) -> tuple[float, float]:
    """Return the milliseconds of a choice among so many replicas whose slots are all in use, and of taking
    note of it. system: tokens that all prompts begin with.
    """
    draw = random.Random(count)

    def ids(length: int) -> list[int]:
        return [draw.randrange(50_000) for _ in range(length)]

    index, begin = PrefixIndex(), ids(system)
    index.keep({f"r{number}": SLOTS for number in range(count)})
    for number in range(count):
        for _ in range(SLOTS):
            index.sent(f"r{number}", prefix_of(begin + ids(PROMPT_TOKENS - system)))
    candidates = [Candidate(f"r{number}", draw.randrange(SLOTS), SLOTS, 2 * SLOTS) for number in range(count)]
    chosen_s, noted_s = [], []
    for _ in range(50):
        begun = time.thread_time()
        prefix = prefix_of(begin + ids(PROMPT_TOKENS - system))
        chosen = choose(candidates, RoutingHint("", prefix=prefix), index, Rules())
        chosen_s.append(time.thread_time() - begun)
        begun = time.thread_time()
        index.sent(chosen[0], prefix)
        noted_s.append(time.thread_time() - begun)
    return 1000 * statistics.median(chosen_s), 1000 * statistics.median(noted_s)


def by_size() -> Iterator[str]:
    """Give a table of what is cached."""
    yield "| replicas x slots, conversations | shared tokens | pause up to | by prompts | power of two |"
    yield "|---|---|---|---|---|"
    for size in SIZES:
        for system in (0, 64, 1000):
            for pause_s in PAUSES_S:
                by_prompts = share_cached(size, system, pause_s, lambda replicas, _: ByPrefix(replicas))
                by_two = share_cached(size, system, pause_s, lambda _, seed: ByPowerOfTwo(seed))
                name = f"{size[0]} x {size[1]}, {size[2]}"
                yield f"| {name} | {system} | {pause_s:g} s | {by_prompts:.1%} | {by_two:.1%} |"


def by_fronts() -> Iterator[str]:
    """Give a table of what is cached with several fronts."""
    yield "| replicas x slots, conversations | fronts | any front | a conversation keeps its front |"
    yield "|---|---|---|---|"
    for size in SIZES:
        for fronts in (1, 2, 4):
            shares = [
                share_cached(size, 64, 5.0, partial(_through_fronts, fronts, sticky))
                for sticky in (False, True)
            ]
            name = f"{size[0]} x {size[1]}, {size[2]}"
            yield f"| {name} | {fronts} | {shares[0]:.1%} | {shares[1]:.1%} |"


def _through_fronts(fronts: int, sticky: bool, replicas: Sequence[SimulatedReplica], seed: int) -> Route:
    return ByFronts(replicas, fronts, seed, sticky=sticky)


def by_replicas() -> Iterator[str]:
    """Give a table of what a choice costs."""
    yield "| replicas | shared tokens | choice | noting it |"
    yield "|---|---|---|---|"
    for count in (2, 10, 100, 1000):
        for system in (0, 500):
            chosen, noted = choice_ms(count, system)
            yield f"| {count:,} | {system} | {chosen:.2f} ms | {noted:.2f} ms |"


if __name__ == "__main__":
    for table in (by_size, by_fronts, by_replicas):
        sys.stdout.write("\n".join((*table(), "", "")))
