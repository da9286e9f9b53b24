"""The search: cheap races among many recipes, longer ones among the few that may win.

Pure: what measures is handed in, and so is the clock. The default recipe runs in every race. Screening tries
shipped recipes that may keep the bound first, then steps away from the default, or from what is faster than
it; a recipe beyond the bound of divergence is not raced. Then successive halving: in each further round,
twice as long, half of those that may still win remain. When the time is up no further race begins, and what
is known decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from llorch_export.tune.candidates import Candidate
from llorch_export.tune.choice import Standings
from llorch_export.tune.standing import Bounds, Judgement, Lap, Scenario, Standing
from llorch_serve.errors import ResourceError

SCREEN_ROUNDS: Final = 2
HALVING_ROUNDS: Final = (4, 8)
ENTRANTS: Final = 3
"""Most candidates in one race, beside the default; each is a process that holds a model."""

_UNLIKELY: Final = 5.0
"""A shipped recipe whose own limit of divergence is so many times the bound comes after all steps."""

_SCREEN_SHARE: Final = 0.6
"""Of the time, until no further recipe is tried."""


class Pool(Protocol):
    """Where candidates come from; see :class:`llorch_export.tune.candidates.Candidates`."""

    default: Candidate

    def named(self) -> list[Candidate]:
        """Return the first ones."""

    def steps(self, start: Candidate) -> list[Candidate]:
        """Return what is one step away from a candidate, and new."""


class Measurer(Protocol):
    """Measures on this machine."""

    def judge(self, candidate: Candidate) -> Judgement:
        """Return what does not depend on the moment."""

    def race(self, entrants: Sequence[Candidate], rounds: int) -> list[Lap]:
        """Run all by turns; return each one's part."""

    def fit(self, folder_bytes: Sequence[int]) -> bool:
        """Tell whether memory has room for artifacts of these sizes at once, loaded."""

    def forget(self, candidate: Candidate) -> None:
        """Give back what is kept for a candidate, which runs no more."""


@dataclass(frozen=True, slots=True)
class Limits:
    """bounds: of what is chosen. weights: of the scenarios. seconds: in all."""

    bounds: Bounds
    weights: dict[Scenario, float]
    seconds: float


Tell = Callable[[Standing, Standings], None]
"""Told of each candidate when something new is known of it."""


class Search:
    """A search. tell: see :data:`Tell`.

    found: what is known so far, also where the search was interrupted; None until the default was judged.
    """

    def __init__(
        self, pool: Pool, measurer: Measurer, limits: Limits, clock: Callable[[], float], tell: Tell
    ) -> None:
        self._pool = pool
        self._measurer = measurer
        self._limits = limits
        self._clock = clock
        self._tell = tell
        self._start = clock()
        self._shipped: deque[Candidate] = deque()
        self._steps: deque[Candidate] = deque()
        self._unlikely: deque[Candidate] = deque()
        self._expanded: set[str] = set()
        self.found: Standings | None = None

    @property
    def _found(self) -> Standings:
        assert self.found is not None, "the default was judged first"
        return self.found

    def run(self) -> Standings:
        """Return all that was found. Raises ResourceError if the default recipe cannot be measured."""
        default = Standing(self._pool.default, self._measurer.judge(self._pool.default))
        _require(default.problem, default)
        self.found = Standings(default, self._limits.bounds, self._limits.weights)
        far = _UNLIKELY * self._limits.bounds.max_kl
        for one in self._pool.named():
            if one.limit <= far:
                self._shipped.append(one)
            else:
                self._unlikely.appendleft(one)  # the coarsest last
        self._screen()
        self._halve()
        return self.found

    def _screen(self) -> None:
        while not self._late(_SCREEN_SHARE) and (batch := self._next_batch()):
            self._race_all(batch, SCREEN_ROUNDS)
            self._follow_the_best()
        if not self._found.default.speeds:
            self._race([], SCREEN_ROUNDS)

    def _halve(self) -> None:
        kept = len(self._found.contenders())
        for rounds in HALVING_ROUNDS:
            contenders = self._found.contenders()[: max(1, -(-kept // 2))]
            if not contenders or self._late(1.0):
                return
            kept = len(contenders)
            self._race_all(contenders, rounds)

    def _late(self, share: float) -> bool:
        return self._clock() - self._start >= share * self._limits.seconds

    def _next_batch(self) -> list[Standing]:
        """Return the next candidates for a race: those that keep the bound of divergence."""
        batch: list[Standing] = []
        while len(batch) < ENTRANTS and not self._late(_SCREEN_SHARE):
            if not (self._shipped or self._steps or batch):  # those of the batch may be next to step from
                self._steps.extend(self._next_steps())
            queue = self._shipped or self._steps or self._unlikely
            if not queue or (queue is self._unlikely and batch):
                break
            standing = self._judged(queue.popleft())
            if standing.lost is None:
                batch.append(standing)
        return batch

    def _follow_the_best(self) -> None:
        """Put the steps from a recipe that seems to be faster than the default before all other steps."""
        best = self._found.best()
        if best is None or best is self._found.default or best.candidate.key in self._expanded:
            return
        self._expanded.add(best.candidate.key)
        self._steps.extendleft(reversed(self._pool.steps(best.candidate)))

    def _next_steps(self) -> list[Candidate]:
        """Return the steps from the fastest candidate that none were made from yet, the default before
        others that are no faster by more than noise.
        """
        able = self._found.able()
        order = [*(one for one in [self._found.best()] if one is not None), self._found.default, *able]
        for one in order:
            if one.candidate.key not in self._expanded:
                self._expanded.add(one.candidate.key)
                if steps := self._pool.steps(one.candidate):
                    return steps
        return []

    def _judged(self, candidate: Candidate) -> Standing:
        standing = Standing(candidate, self._measurer.judge(candidate))
        self._found.add(standing)
        if standing.lost is None:
            standing.lost = self._found.beyond(standing)
        if standing.lost is not None:
            self._leave(standing)
        return standing

    def _race_all(self, standings: Sequence[Standing], rounds: int) -> None:
        """Race candidates, as many at a time as memory has room for beside the default."""
        part: list[Standing] = []
        for standing in standings:
            if part and (len(part) == ENTRANTS or not self._fit([*part, standing])):
                self._race(part, rounds)
                part = []
            part.append(standing)
        self._race(part, rounds)
        self._settle()

    def _fit(self, standings: Sequence[Standing]) -> bool:
        together = [self._found.default, *standings]
        return self._measurer.fit([one.judgement.folder_bytes or 0 for one in together])

    def _race(self, standings: Sequence[Standing], rounds: int) -> None:
        default = self._found.default
        entrants = [default.candidate, *(one.candidate for one in standings)]
        base, *laps = self._measurer.race(entrants, rounds)
        if not default.speeds:
            _require(base.problem, default)
        default.add(Lap(rounds=base.rounds, peak_mib=base.peak_mib), base, self._found.weights)
        for standing, lap in zip(standings, laps, strict=True):
            standing.add(lap, base, self._found.weights)
            if not standing.ratios and standing.problem is None:
                standing.problem = standing.lost = f"the default recipe failed beside it: {base.problem}"

    def _settle(self) -> None:
        """Let go of those that cannot win any more."""
        may_win = self._found.contenders()
        for standing in self._found.all():
            if standing is self._found.default or standing in may_win or not standing.speeds:
                continue
            if standing.lost is None:
                standing.lost = self._found.beyond(standing) or "slower"
                self._leave(standing)
        for standing in may_win:
            self._tell(standing, self._found)

    def _leave(self, standing: Standing) -> None:
        self._tell(standing, self._found)
        key = standing.candidate.artifact_key
        if all(one.lost is not None or one.candidate.artifact_key != key for one in self._found.all()):
            self._measurer.forget(standing.candidate)


def _require(problem: str | None, default: Standing) -> None:
    """Raise ResourceError where the default recipe, which all others are compared with, was not measured."""
    if problem is not None:
        raise ResourceError(
            f"the default recipe {default.candidate.label} cannot be measured here, so nothing can be "
            f"compared with it: {problem}"
        )
