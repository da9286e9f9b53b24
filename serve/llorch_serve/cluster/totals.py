"""What the replicas of a model are together: the figures that ``GetLoad``, /metrics and a pool manager get.

Input: how busy each replica says that it is, look by look. Output: their sums, and each one's figures.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from llorch_serve.cluster.interfaces import ReplicaLoad
from llorch_serve.engine.load import Load, WorkerState
from llorch_serve.requests import TextGenerator

_COUNTERS: Final = ("prompt_tokens", "cached_tokens", "generated_tokens", "drafted_tokens", "accepted_tokens")
_MOMENTARY: Final = (
    "running", "waiting", "slots", "kv_tokens_running", "kv_tokens_idle", "kv_tokens_total",
    "tokens_per_second", "loaded_bytes", "total_bytes",
)  # fmt: skip
_MOST_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True)
class Totals:
    """Figures of one moment. load: of all replicas together. replicas: each one's, in the order of names.

    memory_bytes: resident memory of their processes. device_memory_bytes: what they hold of GPUs; None where
        one of them does not know it.
    """

    load: Load
    replicas: tuple[ReplicaLoad, ...]
    memory_bytes: int
    device_memory_bytes: int | None


@runtime_checkable
class Replicated(Protocol):
    """A generator whose model runs on replicas."""

    def totals(self) -> Totals:
        """Return what the replicas were at the last look at them."""


def totals_of(generator: TextGenerator) -> Totals | None:
    """Return the totals of the generator behind observers, if its model runs on replicas."""
    inner = getattr(generator, "inner", generator)
    return inner.totals() if isinstance(inner, Replicated) else None


def together(parts: Sequence[Totals]) -> Totals:
    """Return the totals of several models of one front."""
    loads = [each.load for each in parts]
    sums = {name: sum(getattr(load, name) for load in loads) for name in (*_COUNTERS, *_MOMENTARY)}
    on_devices = [each.device_memory_bytes for each in parts if each.replicas]
    return Totals(
        Load(**sums, state=WorkerState.READY),
        tuple(sorted((one for each in parts for one in each.replicas), key=lambda one: one.replica)),
        sum(each.memory_bytes for each in parts),
        None if not on_devices or None in on_devices else sum(each or 0 for each in on_devices),
    )


class Tally:
    """Sums the figures of one model's replicas. fingerprint: the model's; replicas of another do not count.
    All methods may be called from any thread.

    Tokens that have been counted stay counted: a replica that has gone, or has not answered this time, is in
    the sums of counters with what it said last. Else a scrape would take a smaller sum for a restart.

    totals: as of the last look.
    """

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._last: dict[str, Load] = {}  # of each replica that was ever seen, the one seen last at the end
        self._forgotten = dict.fromkeys(_COUNTERS, 0)
        self._lock = threading.Lock()
        self.totals = self.look(())

    def look(self, loads: Sequence[ReplicaLoad]) -> Totals:
        """Take what the replicas say now; return the totals."""
        here = sorted(
            (each for each in loads if each.fingerprint == self.fingerprint), key=lambda each: each.replica
        )
        with self._lock:
            self._count(here)
            counted = {
                name: self._forgotten[name] + sum(getattr(load, name) for load in self._last.values())
                for name in _COUNTERS
            }
            momentary = {name: sum(getattr(each.load, name) for each in here) for name in _MOMENTARY}
            on_devices = [each.device_memory_bytes for each in here]
            self.totals = Totals(
                Load(**counted, **momentary, state=WorkerState.READY),
                tuple(here),
                sum(each.memory_bytes for each in here),
                None if not here or None in on_devices else sum(each or 0 for each in on_devices),
            )
            return self.totals

    def _count(self, here: Sequence[ReplicaLoad]) -> None:
        for each in here:
            before = self._last.pop(each.replica, each.load)
            # Where two generators look, the later look may end first.
            self._last[each.replica] = max(before, each.load, key=_tokens)
        while len(self._last) > max(_MOST_REMEMBERED, len(here)):
            gone = self._last.pop(next(iter(self._last)))
            for name in _COUNTERS:
                self._forgotten[name] += getattr(gone, name)


def _tokens(load: Load) -> int:
    return sum(getattr(load, name) for name in _COUNTERS)
