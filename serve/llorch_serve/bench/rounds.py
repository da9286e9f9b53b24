"""The comparison: every entry in a process of its own, tests in rounds, so that a machine that drifts drifts
for all alike.

An entry that fails keeps what it has and its reason, and the others go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from msgspec.structs import replace

from llorch_serve.bench.entries import PlannedEntry
from llorch_serve.bench.offline import summarise
from llorch_serve.bench.process import ProblemError
from llorch_serve.bench.protocol import (
    Close,
    Closed,
    Judge,
    Judged,
    Open,
    Opened,
    Question,
    Ran,
    Run,
    Settings,
)
from llorch_serve.bench.schema import Entry, OfflineTest, Problem, Row

_Answer = TypeVar("_Answer")


class AnsweringProcess(Protocol):
    """A process that answers; see :class:`llorch_serve.bench.process.EntryProcess`. Every method may raise
    ProblemError.
    """

    def greet(self) -> None:
        """Wait until it runs."""

    def ask(self, question: Question, kind: type[_Answer]) -> _Answer:
        """Return its answer."""

    def close(self) -> None:
        """End it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is done with every entry.

    prompt_ids: of all prompts; None: the sample text. tokenizer: a tokenizer.json to use instead of the
        models' own.
    reference: a file to compare every model with, or None. repeat: counted rounds, after one that warms up.
    settings: returns those of an entry.
    """

    tests: Sequence[OfflineTest]
    longest: int
    repeat: int
    prompt_ids: tuple[int, ...] | None
    tokenizer: str | None
    reference: str | None
    settings: Callable[[PlannedEntry], Settings]


@dataclass(slots=True)
class _Contestant:
    """An entry under way. runs: for each test its runs' values, the warm-up's not among them."""

    entry: Entry
    process: AnsweringProcess | None = None
    runs: list[list[dict[str, float]]] = field(default_factory=list)
    problems: list[Problem | None] = field(default_factory=list)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[AnsweringProcess | None]:
        """Give the process to what is done with it, None if it has failed before; keep the reason if it fails
        now.
        """
        try:
            yield self.process
        except ProblemError as error:
            self.entry = replace(self.entry, problem=error.problem)
            self.end()

    def end(self) -> None:
        if self.process is not None:
            self.process.close()
        self.process = None


def compare(
    wanted: Sequence[PlannedEntry],
    plan: Plan,
    start: Callable[[PlannedEntry], AnsweringProcess],
    progress: Callable[[], None],
) -> tuple[Entry, ...]:
    """Measure all entries; return them in their order. start: makes an entry's process; may raise
    ProblemError.

    progress: told of each run, of which there are ``len(wanted) * len(plan.tests) * (plan.repeat + 1)`` if
        none fails.
    """
    contestants = [
        _Contestant(
            Entry(label=one.label, provider=one.choice.name or "cpu"),
            runs=[[] for _ in plan.tests],
            problems=[None for _ in plan.tests],
        )
        for one in wanted
    ]
    try:
        for contestant, one in zip(contestants, wanted, strict=True):
            with contestant.attempt():
                _open(contestant, one, plan, start)
        for index in range(plan.repeat + 1):
            turns = contestants[::-1] if index % 2 else contestants
            _round(turns, plan, progress, counts=index > 0)
        for contestant in contestants:
            with contestant.attempt() as process:
                if process is not None:
                    peak = process.ask(Close(), Closed).peak_rss_mib
                    contestant.entry = replace(contestant.entry, peak_rss_mib=peak)
        for contestant in contestants:
            with contestant.attempt() as process:
                if process is not None and plan.reference is not None:
                    fidelity = process.ask(Judge(reference=plan.reference), Judged).fidelity
                    contestant.entry = replace(contestant.entry, fidelity=fidelity)
    finally:
        for contestant in contestants:
            contestant.end()
    return tuple(_finished(contestant, plan.tests) for contestant in contestants)


def _open(
    contestant: _Contestant, one: PlannedEntry, plan: Plan, start: Callable[[PlannedEntry], AnsweringProcess]
) -> None:
    contestant.process = start(one)
    contestant.process.greet()
    question = Open(
        label=one.label,
        folder=str(one.folder.resolve()),
        tokenizer=plan.tokenizer,
        settings=plan.settings(one),
        prompt_ids=plan.prompt_ids,
        longest=plan.longest,
    )
    contestant.entry = contestant.process.ask(question, Opened).entry


def _round(
    contestants: Sequence[_Contestant], plan: Plan, progress: Callable[[], None], *, counts: bool
) -> None:
    """Run every test once, each with all entries in turn."""
    for number, test in enumerate(plan.tests):
        for contestant in contestants:
            with contestant.attempt() as process:
                if process is None or contestant.problems[number] is not None:
                    continue
                try:
                    values = process.ask(Run(test=test), Ran).values
                except ProblemError as error:
                    if not error.goes_on:
                        raise
                    contestant.problems[number] = error.problem
                else:
                    if counts:
                        contestant.runs[number].append(values)
                progress()


def _finished(contestant: _Contestant, tests: Sequence[OfflineTest]) -> Entry:
    rows = []
    for test, runs, problem in zip(tests, contestant.runs, contestant.problems, strict=True):
        if runs or problem is not None:
            rows.append(Row(test=test, figures=summarise(runs), problem=problem))
    return replace(contestant.entry, rows=tuple(rows))
