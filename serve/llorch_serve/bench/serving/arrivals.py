"""When requests are sent: by users who each wait for their answer, or at moments drawn before the run.

A closed loop slows down with the worker: its users send nothing while they wait. An open loop does not: its
requests come whatever has become of the earlier ones, as people's do who know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """``concurrency`` users, each of whom sends the next request as soon as its last one has ended."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests at moments drawn before the run.

    rate: requests per second in the mean. burstiness: 1 is a Poisson process; below 1 requests come in
        bursts, above 1
    more evenly. seed: of the draws, the same moments for the same seed.
    """

    rate: float
    burstiness: float
    seed: int

    def moments(self) -> Iterator[float]:
        """Yield when each request is to be sent, in seconds after the start, without end. The first is one
        gap after it.

        Gaps are drawn from a gamma distribution of mean 1 / rate and shape ``burstiness``: their coefficient
        of variation is 1 / sqrt(burstiness). Shape 1 is the exponential distribution, whose arrivals are
        Poisson's.
        """
        generator = np.random.default_rng(self.seed)
        moment = 0.0
        while True:
            moment += float(generator.gamma(self.burstiness, 1 / (self.rate * self.burstiness)))
            yield moment


Arrivals = ClosedLoop | OpenLoop
