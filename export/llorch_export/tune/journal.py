"""What was measured, kept line by line, so that a search that was ended goes on where it was.

A journal lies in a folder of its own for each model, machine, set of versions and work. A search that starts
again asks the same questions in the same order; a journal answers those that were answered before, and its
answers lead to the same next question. Failures are not kept: what failed is tried again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from llorch_export.tune.candidates import Candidate
from llorch_export.tune.search import Measurer
from llorch_export.tune.standing import Judgement, Lap
from llorch_serve.errors import ResourceError
from llorch_serve.files.json_errors import NOT_JSON

_MAX_BYTES: Final = 2**26


class Judged(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """An artifact was looked at. candidate: what names it."""

    candidate: str
    judgement: Judgement


class Raced(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Candidates have run by turns."""

    candidates: tuple[str, ...]
    rounds: int
    laps: tuple[Lap, ...]


Line = Judged | Raced


class Journal:
    """The file. Raises ResourceError, from every method, if it cannot be read or written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines, whole = _read(path)
        self.taken_up = len(self._lines)
        if whole is not None:  # what was being written when the last search ended
            with _named(path):
                os.truncate(path, whole)

    @property
    def lines(self) -> Sequence[Line]:
        """What is kept, oldest first."""
        return self._lines

    def add(self, line: Line) -> None:
        """Keep a line; it is on the disk when this returns."""
        with _named(self._path), self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._lines.append(line)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn OSError into the refusal that names the journal."""
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"{path} cannot be written ({error.strerror}); name a folder with room in LLORCH_CACHE"
        ) from error


class JournaledMeasurer:
    """Asks a journal first, and keeps what another measurer answers."""

    def __init__(self, inner: Measurer, journal: Journal) -> None:
        self._inner = inner
        self._journal = journal
        self._judged = {line.candidate: line.judgement for line in journal.lines if isinstance(line, Judged)}
        self._raced = {
            (line.candidates, line.rounds): list(line.laps)
            for line in journal.lines
            if isinstance(line, Raced)
        }

    def judge(self, candidate: Candidate) -> Judgement:
        """See :class:`llorch_export.tune.search.Measurer`."""
        known = self._judged.get(candidate.artifact_key)
        if known is not None:
            return known
        found = self._inner.judge(candidate)
        if found.problem is None:
            self._judged[candidate.artifact_key] = found
            self._journal.add(Judged(candidate=candidate.artifact_key, judgement=found))
        return found

    def race(self, entrants: Sequence[Candidate], rounds: int) -> list[Lap]:
        """See :class:`llorch_export.tune.search.Measurer`."""
        keys = tuple(one.key for one in entrants)
        known = self._raced.pop((keys, rounds), None)
        if known is not None:
            return known
        laps = self._inner.race(entrants, rounds)
        if all(lap.problem is None for lap in laps):
            self._journal.add(Raced(candidates=keys, rounds=rounds, laps=tuple(laps)))
        return laps

    def fit(self, folder_bytes: Sequence[int]) -> bool:
        """See :class:`llorch_export.tune.search.Measurer`."""
        return self._inner.fit(folder_bytes)

    def forget(self, candidate: Candidate) -> None:
        """See :class:`llorch_export.tune.search.Measurer`."""
        self._inner.forget(candidate)


def journal_name(facts: object) -> str:
    """Return a folder's name for what a journal's figures hold for; facts: what JSON can hold."""
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:24]


def _read(path: Path) -> tuple[list[Line], int | None]:
    """Return the lines, and the bytes that are whole where something behind them is not."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return [], None
    except OSError as error:
        raise ResourceError(
            f"{path} cannot be read ({error.strerror}); remove it, or name another folder in LLORCH_CACHE"
        ) from error
    decoder = msgspec.json.Decoder(Line)
    lines: list[Line] = []
    whole = 0
    for line in content.splitlines(keepends=True):
        try:
            found = decoder.decode(line)
        except NOT_JSON:
            return lines, whole
        if not line.endswith(b"\n"):
            return lines, whole
        lines.append(found)
        whole += len(line)
    return lines, None
