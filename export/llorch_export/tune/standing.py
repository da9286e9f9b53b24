"""What is known of each candidate, and what of it is more than noise.

A speed is never compared with one of another minute. Candidates run in races with the default recipe, turn by
turn, and what counts is the ratio of a candidate's speed in a round to the default's in the same round. How
far a candidate's rounds are from each other says how far its ratio can be trusted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from llorch_export.tune.candidates import Candidate
from llorch_serve.bench.schema import FidelityResult

_OF_MEDIANS: Final = math.sqrt(math.pi / 2)
"""Standard error of a median of many over that of their mean."""

_EXPECTED: Final = 0.05
"""Deviation of a round's ratio that is reckoned with before any was seen."""

_EXPECTED_WEIGHT: Final = 2
"""Rounds that this expectation is worth beside those that were seen."""

LEAST_MARGIN: Final = 0.01
"""Part of a speed that is never told from noise: where things lie in memory costs as much, in every round of
a process.
"""

Scenario = str
"""A speed that counts, like ``decode, 8 streams``."""


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What one look at a candidate's artifact gives. folder_bytes: its size. problem: why it gave nothing."""

    fidelity: FidelityResult | None = None
    folder_bytes: int | None = None
    problem: str | None = None


class Lap(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate's part of a race. rounds: of each counted round its speeds in tokens/s. problem: why it
    has none.
    """

    rounds: tuple[dict[Scenario, float], ...] = ()
    peak_mib: float | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a recipe may cost: nats, and MiB of a process that serves. None: as much as it likes."""

    max_kl: float
    memory_mib: float | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """A speed as the natural logarithm of its ratio to the default's. error: its standard error."""

    value: float
    error: float

    @property
    def ratio(self) -> float:
        """The ratio itself."""
        return math.exp(self.value)

    def margin(self, trust: float) -> float:
        """Return how far the truth may be from ``value``; trust: in standard errors."""
        return max(trust * self.error, LEAST_MARGIN)

    def beats(self, other: Score, trust: float) -> bool:
        """Tell whether it is faster by more than noise."""
        return self.value - other.value > Score(0.0, math.hypot(self.error, other.error)).margin(trust)


DEFAULT_SCORE: Final = Score(0.0, 0.0)
"""The default's own; the noise of its rounds is in every ratio to it."""


@dataclass(slots=True)
class Standing:
    """One candidate.

    speeds: of every round it has run. ratios: of the same rounds, logarithms of the weighted geometric mean
    of speeds over the default's.
    peak_mib: the most of any race. problem: why it cannot be used. lost: why it runs no more, which may be
    that; None while it may win.
    """

    candidate: Candidate
    judgement: Judgement
    speeds: list[dict[Scenario, float]] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    peak_mib: float | None = None
    problem: str | None = None
    lost: str | None = None

    def __post_init__(self) -> None:
        self.problem = self.lost = self.judgement.problem

    @property
    def kl(self) -> float:
        """Divergence in nats; infinite where none was measured."""
        found = self.judgement.fidelity
        return math.inf if found is None else found.kl

    def medians(self) -> dict[Scenario, float]:
        """Return the median speed of each scenario."""
        names = self.speeds[0] if self.speeds else {}
        return {name: statistics.median(speeds[name] for speeds in self.speeds) for name in names}

    def add(self, lap: Lap, base: Lap, weights: Mapping[Scenario, float]) -> None:
        """Take in a race. base: the default's part of it. Rounds that either has not run do not count."""
        if lap.problem is not None:
            self.problem = self.lost = lap.problem
        if lap.peak_mib is not None:
            self.peak_mib = max(lap.peak_mib, self.peak_mib or 0.0)
        for own, other in zip(lap.rounds, base.rounds, strict=False):
            self.speeds.append(own)
            self.ratios.append(ratio(own, other, weights))


def ratio(
    own: Mapping[Scenario, float], other: Mapping[Scenario, float], weights: Mapping[str, float]
) -> float:
    """Return the logarithm of the weighted geometric mean of speeds over others'."""
    total = sum(weights.values())
    return sum(weight * math.log(own[name] / other[name]) for name, weight in weights.items()) / total


def deviation(groups: Iterable[Sequence[float]]) -> float | None:
    """Return the standard deviation of single rounds, of all groups' rounds about their own mean; None
    where no group has two.
    """
    squares, freedom = _squares(groups)
    return math.sqrt(squares / freedom) if freedom else None


def usual_deviation(groups: Iterable[Sequence[float]]) -> float:
    """Return the same, as it is to be reckoned with: while few rounds have been seen, they may agree by
    chance, and the deviation is taken to be nearer to that of a busy machine.
    """
    squares, freedom = _squares(groups)
    return math.sqrt((squares + _EXPECTED_WEIGHT * _EXPECTED**2) / (freedom + _EXPECTED_WEIGHT))


def _squares(groups: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Return the sum of squares about each group's own mean, and its degrees of freedom."""
    squares, freedom = 0.0, 0
    for group in groups:
        if len(group) > 1:
            middle = sum(group) / len(group)
            squares += sum((one - middle) ** 2 for one in group)
            freedom += len(group) - 1
    return squares, freedom


def score(ratios: Sequence[float], usual: float) -> Score:
    """Return the score of a candidate's rounds, of which there is at least one.

    usual: the deviation of all candidates' rounds; a candidate's own counts where it is larger.
    """
    single = max(deviation([ratios]) or 0.0, usual)
    of_median = _OF_MEDIANS if len(ratios) > 2 else 1.0
    return Score(statistics.median(ratios), of_median * single / math.sqrt(len(ratios)))
