"""What one run found, as it is kept in JSON, and the arithmetic on it: medians, ratios of medians, their
spread.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Literal

import msgspec

from bench_peers.protocol import Measurement
from bench_peers.reuse import Gains
from llorch_serve.files.documents import read_document

SCHEMA_VERSION: Final = 2
_MAX_BYTES: Final = 64 * 2**20


class Machine(msgspec.Struct, frozen=True):
    """Where it was measured.

    load: processes that wanted a CPU before the first round, averaged over a minute. vendor: who made the
        CPU; empty where the system does not say. virtual: whether it tells of a hypervisor; None: not asked.
    """

    cpu: str
    cores: int
    instructions: list[str]
    memory_gib: float
    system: str
    load: float
    vendor: str = ""
    virtual: bool | None = None


class Subject(msgspec.Struct, frozen=True):
    """One engine with one model. kl, top1: against the fp32 reference, over the run's positions.

    made: the flags of ``llorch export``, or what a peer's converter was told.
    """

    label: str
    ours: bool
    version: str
    made: str
    kl: float
    top1: float


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of ``ci/bench``.

    command: as it was given. positions: tokens of text that fidelity was measured on, against ``oracle``.
    rounds: by label, in the order they ran. first_token_s: of each round, by label, from a command's start to
        the first byte that it prints; empty if that was not measured.
    gains: one each round, of the recipe ``gains_of``.
    """

    date: str
    command: str
    machine: Machine
    threads: int
    prompt_tokens: int
    new_tokens: int
    positions: int
    oracle: str
    subjects: list[Subject]
    rounds: list[dict[str, list[Measurement]]]
    first_token_s: list[dict[str, float]] = []
    gains_of: str
    gains: list[Gains]

    def of(self, *, ours: bool) -> list[Subject]:
        """Return our subjects, or the peers."""
        return [subject for subject in self.subjects if subject.ours is ours]


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last run on each kind of machine, as :func:`bench_peers.machine.kind_of` tells them apart."""

    schema_version: Literal[2] = SCHEMA_VERSION
    runs: list[Run]


def read_runs(path: Path) -> list[Run]:
    """Return the runs of a document; none where there is no file. Raises UsageError for anything else."""
    if not path.exists():
        return []
    what = f"document of runs, schema version {SCHEMA_VERSION}"
    return read_document(path, Document, what=what, made_by="ci/bench", most_bytes=_MAX_BYTES).runs


class Kind(Enum):
    """What a speed is of."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Metric:
    """One speed: prompt tokens or later tokens per second, of all streams together."""

    kind: Kind
    streams: int

    def __str__(self) -> str:
        return f"{self.kind.value}, {self.streams} stream{'s' if self.streams > 1 else ''}"


PREFILL: Final = Metric(Kind.PREFILL, 1)
DECODE: Final = tuple(Metric(Kind.DECODE, streams) for streams in (1, 8, 32))
METRICS: Final = (PREFILL, *DECODE)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of two medians; low and high are the extremes of the ratios within single rounds."""

    value: float
    low: float
    high: float


def series(run: Run, label: str, metric: Metric) -> tuple[float, ...]:
    """Return a speed in each round, in tokens per second; empty if the engine does not do that many
    streams.
    """
    found = []
    for measurements in run.rounds:
        for one in measurements[label]:
            if one.streams == metric.streams:
                prefill = metric.kind is Kind.PREFILL
                found.append(one.prefill_tokens_per_s if prefill else one.decode_tokens_per_s)
    return tuple(speed for speed in found if speed is not None)


def peak_mib(run: Run, label: str) -> float | None:
    """Return the most memory that an engine's process held in any round, with as many streams as it does."""
    peaks = [one.peak_mib for measurements in run.rounds for one in measurements[label]]
    known = [peak for peak in peaks if peak is not None]
    return max(known) if known else None


def first_tokens(run: Run, label: str) -> tuple[float, ...]:
    """Return seconds from a command's start to its first byte, one each round; empty if not measured."""
    return tuple(one[label] for one in run.first_token_s)


def ratio(upper: Sequence[float], lower: Sequence[float]) -> Ratio:
    """Return the ratio of two medians, with its extremes over the rounds, of which both have the same."""
    single = [above / below for above, below in zip(upper, lower, strict=True)]
    return Ratio(statistics.median(upper) / statistics.median(lower), min(single), max(single))


def fastest(run: Run, subjects: Sequence[Subject], metric: Metric) -> Subject | None:
    """Return the subject with the highest median, of those that have the metric; None if none has."""
    measured = [subject for subject in subjects if series(run, subject.label, metric)]
    return max(
        measured, key=lambda subject: statistics.median(series(run, subject.label, metric)), default=None
    )
