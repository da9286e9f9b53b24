"""All candidates that were measured, and the choice among them: who is within bounds, who may still win, who
wins.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Final

from llorch_export.tune.candidates import Candidate
from llorch_export.tune.standing import (
    DEFAULT_SCORE,
    Bounds,
    Scenario,
    Score,
    Standing,
    deviation,
    score,
    usual_deviation,
)

_SLOWER: Final = 2.0
"""Standard errors by which a recipe must be slower than another to be left out."""

_CHANCE: Final = 0.01
"""That some recipe is taken for faster than the default although none is."""


class Standings:
    """What is known of every candidate.

    default: the recipe that is kept unless another one is faster by more than noise. weights: of the
    scenarios.
    """

    def __init__(self, default: Standing, bounds: Bounds, weights: Mapping[Scenario, float]) -> None:
        self.default = default
        self.bounds = bounds
        self.weights = weights
        self._by_key = {default.candidate.key: default}

    def add(self, standing: Standing) -> None:
        """Take in a candidate that was judged."""
        self._by_key[standing.candidate.key] = standing

    def of(self, candidate: Candidate) -> Standing:
        """Return what is known of a candidate that was judged."""
        return self._by_key[candidate.key]

    def all(self) -> list[Standing]:
        """Return every candidate, in the order in which they were judged, the default first."""
        return list(self._by_key.values())

    def measured(self) -> list[Standing]:
        """Return those whose speed is known."""
        return [one for one in self.all() if one.ratios or one is self.default]

    def round_noise(self) -> float | None:
        """Return how far a round is from the mean of its candidate's rounds, over all candidates; None where
        nothing has run twice.
        """
        return deviation(self._rounds())

    def _rounds(self) -> list[list[float]]:
        return [one.ratios for one in self.all() if one is not self.default]

    def score(self, standing: Standing) -> Score:
        """Return a candidate's speed beside the default's. It must have run."""
        if standing is self.default:
            return DEFAULT_SCORE
        return score(standing.ratios, usual_deviation(self._rounds()))

    def trust(self) -> float:
        """Return the standard errors by which a recipe must be faster than the default to take its place.

        The more are tried, the further the luckiest of them is from its true speed.
        """
        return statistics.NormalDist().inv_cdf(1 - _CHANCE / max(1, len(self.measured()) - 1))

    def beyond(self, standing: Standing) -> str | None:
        """Return which bound a candidate does not keep, in words; None if it keeps those that are known."""
        if standing.kl > self.bounds.max_kl:
            return f"KL {standing.kl:.3g} is beyond {self.bounds.max_kl:g}"
        limit = self.bounds.memory_mib
        if limit is not None and standing.peak_mib is not None and standing.peak_mib > limit:
            return f"{standing.peak_mib:,.0f} MiB are beyond {limit:,.0f}"
        return None

    def able(self) -> list[Standing]:
        """Return those whose speed is known and which keep the bounds, the fastest first."""
        found = [one for one in self.measured() if self.beyond(one) is None and one.problem is None]
        return sorted(found, key=lambda one: -self.score(one).value)

    def contenders(self) -> list[Standing]:
        """Return those that may still be chosen, the fastest first; the default is not among them.

        What is slower than the fastest by more than noise cannot be; nor can what is slower than the default
        by more than noise, where the default keeps the bounds.
        """
        able = self.able()
        if not able:
            return []
        to_match = [self.score(able[0]), *([DEFAULT_SCORE] if self.default in able else [])]
        return [
            one
            for one in able
            if one is not self.default
            and one.lost is None
            and not any(better.beats(self.score(one), _SLOWER) for better in to_match)
        ]

    def best(self) -> Standing | None:
        """Return the recipe to keep; None if nothing keeps the bounds.

        The default, unless another is faster by more than noise. Of several that are, those within noise of
        the fastest are the same, and the nearest to the reference is chosen.
        """
        able = self.able()
        rivals = able
        if self.default in able:
            rivals = [one for one in able if self.score(one).beats(DEFAULT_SCORE, self.trust())]
            if not rivals:
                return self.default
        if not rivals:
            return None
        fastest = self.score(rivals[0])
        same = [one for one in rivals if not fastest.beats(self.score(one), _SLOWER)]
        return min(same, key=lambda one: one.kl)

    def frontier(self) -> list[Standing]:
        """Return those that no other one equals or betters in speed, memory and divergence, the fastest
        first.
        """
        known = [
            one for one in self.measured() if one.judgement.fidelity is not None and one.peak_mib is not None
        ]
        return sorted(
            (one for one in known if not any(self._dominates(other, one) for other in known)),
            key=lambda one: -self.score(one).value,
        )

    def _dominates(self, other: Standing, one: Standing) -> bool:
        pairs = [
            (self.score(other).value, self.score(one).value),
            (-other.kl, -one.kl),
            (-(other.peak_mib or 0.0), -(one.peak_mib or 0.0)),
        ]
        return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)
