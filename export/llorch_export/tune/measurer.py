"""Measures candidates on this machine: exports them, and has ``llorch bench``'s processes run them by turns.

Every model is loaded in a process of its own, whose most memory is the figure of memory. Artifacts lie in the
search's folder while their recipes may win.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil

from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.tune.candidates import Candidate
from llorch_export.tune.scenarios import Scenarios
from llorch_export.tune.standing import Judgement, Lap
from llorch_serve.artifact.folder import Artifact, is_artifact, load_artifact
from llorch_serve.bench.entries import PlannedEntry
from llorch_serve.bench.process import EntryProcess
from llorch_serve.bench.protocol import Settings
from llorch_serve.bench.rounds import Plan, compare
from llorch_serve.bench.schema import Entry, OfflineTest
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError, ProviderError, UsageError
from llorch_serve.providers import ProviderChoice

_LOADED: Final = 3.0  # memory of a process over its artifact's bytes: what is mapped, packed, and the cache
_PROCESS_BYTES: Final = 2**29
_ROOM: Final = 0.8  # of the memory that is free


class MachineMeasurer:
    """See :class:`llorch_export.tune.search.Measurer`.

    base: options that every export has: source and embedding. folder: for artifacts. reference: the file
    that candidates are compared with. say: takes a line for people on what is done next.
    """

    def __init__(
        self,
        base: ExportOptions,
        folder: Path,
        reference: Path,
        work: Scenarios,
        say: Callable[[str], None],
    ) -> None:
        self._base = base
        self._folder = folder
        self._reference = reference
        self._work = work
        self._say = say

    def artifact(self, candidate: Candidate) -> Artifact:
        """Return the candidate's artifact, which is exported where it is not there. Raises LlorchError."""
        place = self._place(candidate)
        if is_artifact(place):
            return load_artifact(place)
        options = candidate.recipe.options(replace(self._base, output=place))
        self._say(f"exporting {candidate.label}")
        return export(options, lambda phase, done, total: None).artifact

    def judge(self, candidate: Candidate) -> Judgement:
        """Export a candidate and compare it with the reference."""
        try:
            artifact = self.artifact(candidate)
        except (UsageError, ArtifactError, ProviderError) as error:
            return Judgement(problem=str(error))
        size = sum(entry.bytes for entry in artifact.manifest.files)
        (entry,) = self._run([candidate], (), 0, self._reference)
        if entry.fidelity is None:
            return Judgement(folder_bytes=size, problem=_problem(entry))
        return Judgement(folder_bytes=size, fidelity=entry.fidelity)

    def race(self, entrants: Sequence[Candidate], rounds: int) -> list[Lap]:
        """Run the candidates by turns, forwards and backwards."""
        for one in entrants:
            self.artifact(one)
        names = "; ".join(one.label for one in entrants)
        self._say(f"running by turns, {rounds} rounds and one to warm up: {names}")
        entries = self._run(entrants, self._work.tests, rounds, None)
        return [self._work.lap(entry) for entry in entries]

    def fit(self, folder_bytes: Sequence[int]) -> bool:
        """Tell whether memory has room for artifacts of these sizes at once, loaded."""
        needed = sum(_LOADED * size + _PROCESS_BYTES for size in folder_bytes)
        return needed <= _ROOM * psutil.virtual_memory().available

    def forget(self, candidate: Candidate) -> None:
        """Remove a candidate's artifact."""
        shutil.rmtree(self._place(candidate), ignore_errors=True)

    def _place(self, candidate: Candidate) -> Path:
        return self._folder / candidate.artifact_key

    def _run(
        self,
        candidates: Sequence[Candidate],
        tests: Sequence[OfflineTest],
        rounds: int,
        reference: Path | None,
    ) -> tuple[Entry, ...]:
        wanted = [
            PlannedEntry(one.label, ProviderChoice(), sys.executable, self._place(one)) for one in candidates
        ]
        session = SessionConfig(slots=self._work.slots)
        chunks = {one.label: one.prefill_chunk for one in candidates}
        plan = Plan(
            tests=tests,
            longest=self._work.longest,
            repeat=rounds,
            prompt_ids=None,
            tokenizer=None,
            reference=None if reference is None else str(reference.resolve()),
            settings=lambda one: Settings.of(session, chunks[one.label]),
        )
        return compare(wanted, plan, lambda one: EntryProcess(one.python, lambda line: None), lambda: None)


def _problem(entry: Entry) -> str:
    return "it was not measured" if entry.problem is None else entry.problem.message
