"""Replicas without a model: the engine's own slot table, a queue, and a clock that is counted.

A call takes as long as the tokens that its replica must compute, and those that it generates one by one. What
a replica reuses is what ``engine/slots.py`` decides, so that a router is judged by the real rules.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llorch_serve.cluster.choice import Candidate, Rules, choose
from llorch_serve.cluster.interfaces import RoutingHint
from llorch_serve.cluster.prefix_index import PrefixIndex, prefix_of
from llorch_serve.engine.reuse import ROWS_LEFT, SHORTEST_REUSE, common_prefix
from llorch_serve.engine.sequence import Limits
from llorch_serve.engine.sequence import Sequence as EngineSequence
from llorch_serve.engine.slots import SlotTable

PREFILL_S = 0.001  # a token of a prompt
DECODE_S = 0.01  # a token of an answer
RULES = Rules()

Route = Callable[[list["SimulatedReplica"], list[int], str], "SimulatedReplica"]


@dataclass
class SimulatedReplica:
    """One replica. waiting: prompt, answer, and who is told the end."""

    name: str
    slots: int
    table: SlotTable = field(init=False)
    running: int = 0
    waiting: deque[tuple[list[int], list[int], Callable[[], None]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.table = SlotTable(self.slots, budget=1_000_000)

    @property
    def ongoing(self) -> int:
        return self.running + len(self.waiting)


@dataclass
class Conversation:
    """What is said in one: the texts of its turns and the answers, as token ids."""

    name: str
    turns: list[list[int]]
    answers: list[list[int]]


class Simulation:
    """Runs conversations against replicas. Counts the tokens that replicas reused, and those that one worker
    with a slot for each prompt would have.
    """

    def __init__(self, replicas: Sequence[SimulatedReplica], route: Route, seed: int) -> None:
        self.replicas = list(replicas)
        self.reused = self.reusable = 0
        self.finished_s = 0.0
        self._route = route
        self._random = random.Random(seed)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._seen: list[list[int]] = []

    def run(self, conversations: Sequence[Conversation], *, longest_pause_s: float) -> None:
        """Have all conversations from beginning to end, each turn after a pause at random."""
        self._longest_pause_s = longest_pause_s
        for conversation in conversations:
            self._later(self._pause(), lambda one=conversation: self._say(one, 0, []))
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        self.finished_s = self._now

    def _pause(self) -> float:
        return self._random.uniform(0, self._longest_pause_s)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self._now + seconds, self._count, act))

    def _say(self, conversation: Conversation, turn: int, history: list[int]) -> None:
        if turn == len(conversation.turns):
            return
        prompt = history + conversation.turns[turn]
        answer = conversation.answers[turn]
        wanted = prompt[: max(len(prompt) - ROWS_LEFT, 0)]
        known = max((common_prefix(wanted, seen) for seen in self._seen), default=0)
        self.reusable += known if known >= SHORTEST_REUSE else 0
        replica = self._route(self.replicas, prompt, conversation.name)

        def ended() -> None:
            said = prompt + answer
            self._later(self._pause(), lambda: self._say(conversation, turn + 1, said))

        replica.waiting.append((prompt, answer, ended))
        self._start(replica)

    def _start(self, replica: SimulatedReplica) -> None:
        while replica.waiting and replica.running < replica.slots:
            prompt, answer, ended = replica.waiting.popleft()
            sequence = EngineSequence("r", list(prompt), len(prompt), Limits(len(answer)))
            replica.table.give(sequence)
            replica.running += 1
            reused = sequence.cache.reused
            self.reused += reused
            sequence.cache.computed = len(prompt)
            self._seen.append(prompt)

            def finish(sequence: EngineSequence = sequence, answer=answer, ended=ended) -> None:  # type: ignore[no-untyped-def]
                sequence.token_ids += answer
                sequence.cache.computed = len(sequence.token_ids) - 1
                replica.table.take_back(sequence, keep=True)
                self._seen.append(sequence.token_ids[: sequence.cache.computed])
                replica.running -= 1
                ended()
                self._start(replica)

            self._later((len(prompt) - reused) * PREFILL_S + len(answer) * DECODE_S, finish)


class ByPrefix:
    """Routes as the front does."""

    def __init__(self, replicas: Sequence[SimulatedReplica], rules: Rules = RULES) -> None:
        self._index = PrefixIndex()
        self._index.keep({one.name: one.slots for one in replicas})
        self._rules = rules

    def __call__(self, replicas: list[SimulatedReplica], prompt: list[int], session: str) -> SimulatedReplica:
        by_name = {one.name: one for one in replicas}
        candidates = [Candidate(one.name, one.ongoing, one.slots, 1_000_000) for one in replicas]
        prefix = prefix_of(prompt)
        chosen = choose(candidates, RoutingHint("r", prefix=prefix), self._index, self._rules)[0]
        self._index.sent(chosen, prefix)
        return by_name[chosen]


class ByPowerOfTwo:
    """Routes to the idler one of two replicas drawn at random, as Ray Serve does by itself."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, replicas: list[SimulatedReplica], prompt: list[int], session: str) -> SimulatedReplica:
        two = self._random.sample(replicas, 2)
        return min(two, key=lambda one: one.ongoing)


def conversations(
    count: int, turns: int, *, system: int, seed: int, said: tuple[int, int] = (8, 60)
) -> list[Conversation]:
    """Return conversations that begin with the same ``system`` tokens. said: fewest and most tokens of a turn
    and of an answer.
    """
    draw = random.Random(seed)
    begin = [draw.randrange(2, 50_000) for _ in range(system)]

    def text() -> list[int]:
        return [draw.randrange(2, 50_000) for _ in range(draw.randint(*said))]

    found = []
    for number in range(count):
        own = [text() for _ in range(turns)]
        own[0] = begin + own[0]
        found.append(Conversation(f"c{number}", own, [text() for _ in range(turns)]))
    return found
