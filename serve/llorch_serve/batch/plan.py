"""The order of a batch's work: a table of all lines on the disk, so that a file of any length can be planned.

It is made anew by every run and thrown away with it: what a batch has done is known from its output alone.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from llorch_serve.batch.lines import MAX_LINE_BYTES, BadLineError, BatchLine, LineForm, UnreadableLineError
from llorch_serve.batch.prefixes import beginning_of, look, prefix_key
from llorch_serve.batch.sources import RawLine, Source
from llorch_serve.errors import ResourceError, UsageError

ORDERED_BLOCK: Final = 1000  # lines among which an order of work may choose, where answers keep the file's
_AT_ONCE: Final = 1000  # rows that are written together
_CACHE_KIB: Final = 32 * 1024  # of the table, in memory
_MOST_REFUSALS: Final = 20  # that are named one by one

_TABLE: Final = """
CREATE TABLE lines (
    number INTEGER PRIMARY KEY, place INTEGER NOT NULL, size INTEGER NOT NULL, checksum INTEGER NOT NULL,
    id BLOB NOT NULL, tokens INTEGER NOT NULL, prefix BLOB, problem TEXT, done INTEGER NOT NULL DEFAULT 0
)
"""


class Order(enum.Enum):
    """In which order lines are answered."""

    GIVEN = "given"
    LONGEST = "longest"  # first, so that the last answers do not run alone
    PREFIX = "prefix"  # lines with equal beginnings together, so that those are computed once


_SORTED: Final = {Order.GIVEN: "number", Order.LONGEST: "tokens DESC, number", Order.PREFIX: "prefix, number"}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a file cannot be run: what is wrong with one line."""

    number: int
    reason: str


class BatchInputError(UsageError):
    """Lines of the input cannot be told apart, so that nothing of it is run. refusals: the first of them."""

    def __init__(self, refusals: list[Refusal], more: int = 0) -> None:
        self.refusals = tuple(refusals)
        told = "; ".join(f"line {one.number} {one.reason}" for one in refusals)
        super().__init__(f"{told}; and {more} more lines" if more else told)


@dataclass(frozen=True, slots=True)
class PlannedLine:
    """A line that is still to do.

    turn: how many lines that are to do are before it in the input.
    number: of the line in its file, where blank lines have one too.
    tokens: of prompt and answer, by estimate.
    """

    turn: int
    number: int
    place: int
    size: int
    checksum: int
    tokens: int
    problem: str | None


@dataclass(slots=True)
class Counts:
    """What the input holds. bad: lines that cannot be answered; bare: those without a url of their own."""

    lines: int = 0
    bad: int = 0
    bare: int = 0
    tokens: int = 0


class Plan:
    """All lines of an input, and which are done. Made by ``make_plan``; used by one thread at a time."""

    def __init__(self, source: Source, form: LineForm, folder: Path, order: Order) -> None:
        self.counts = Counts()
        self._source = source
        self._form = form
        self._order = order
        self._table = sqlite3.connect(folder / "lines.sqlite3", isolation_level=None, check_same_thread=False)
        for setting in (
            "journal_mode=OFF",
            "synchronous=OFF",
            f"cache_size=-{_CACHE_KIB}",
            "temp_store=FILE",
        ):
            self._table.execute(f"PRAGMA {setting}")
        self._table.execute(_TABLE)

    @property
    def input_sha256(self) -> str:
        """The hash of the whole input."""
        return self._source.sha256()

    def fill(self) -> None:
        """Read the input once. Raises BatchInputError, UsageError, OSError."""
        refusals: list[Refusal] = []
        refused = 0
        rows: list[tuple[object, ...]] = []
        self._table.execute("BEGIN")
        for raw in self._source.scan():
            try:
                rows.append(self._row(raw))
            except UnreadableLineError as error:
                refused += 1
                if len(refusals) < _MOST_REFUSALS:
                    refusals.append(Refusal(raw.number, str(error)))
            if len(rows) == _AT_ONCE:
                self._insert(rows)
        self._insert(rows)
        self._table.execute("COMMIT")
        if refusals:
            raise BatchInputError(refusals, refused - len(refusals))
        if not self.counts.lines:
            raise UsageError("the input holds no lines; give one request a line")
        self._refuse_duplicates()

    def _row(self, raw: RawLine) -> tuple[object, ...]:
        if raw.raw is None:
            raise UnreadableLineError(f"has {raw.size} bytes; expected at most {MAX_LINE_BYTES}")
        problem = None
        prefix = None
        tokens = 0
        try:
            line = self._form.read(raw.number, raw.raw)
            custom_id = line.custom_id
            outlook = look(line.body)
            tokens = outlook.tokens
            self.counts.bare += line.is_bare
            if outlook.is_stream:
                problem = "asks for a stream, and an answer in a file is whole; leave stream out"
            if self._order is Order.PREFIX:
                prefix = prefix_key(beginning_of(line.body))
        except BadLineError as error:
            custom_id, problem = error.custom_id, str(error)
        self.counts.lines += 1
        self.counts.bad += problem is not None
        self.counts.tokens += tokens
        checksum = zlib.crc32(raw.raw)
        return raw.number, raw.place, raw.size, checksum, hash_id(custom_id), tokens, prefix, problem

    def _insert(self, rows: list[tuple[object, ...]]) -> None:
        self._table.executemany(
            "INSERT INTO lines (number, place, size, checksum, id, tokens, prefix, problem)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
        rows.clear()

    def _refuse_duplicates(self) -> None:
        # Sorted once when all are there: millions of hashes put in one by one would read the disk for each.
        self._table.execute("CREATE INDEX by_id ON lines (id)")
        found = self._table.execute(
            "SELECT min(number), max(number), count(*) OVER () FROM lines GROUP BY id HAVING count(*) > 1"
            " ORDER BY min(number) LIMIT ?",
            (_MOST_REFUSALS,),
        ).fetchall()
        if found:
            refusals = [
                Refusal(last, f"has the custom_id of line {first}; each line needs one of its own")
                for first, last, _ in found
            ]
            raise BatchInputError(refusals, found[0][2] - len(found))

    def number_of(self, custom_id: str) -> int | None:
        """Return the number of the line with this id, None if there is none."""
        row = self._table.execute("SELECT number FROM lines WHERE id = ?", (hash_id(custom_id),)).fetchone()
        return row[0] if row else None

    def is_done(self, number: int) -> bool:
        """Whether this line is left out of what is to do."""
        return bool(self._table.execute("SELECT done FROM lines WHERE number = ?", (number,)).fetchone()[0])

    def mark_done(self, numbers: Iterable[int]) -> None:
        """Leave these lines out of what is to do."""
        self._table.execute("BEGIN")
        for number in numbers:
            self._table.execute("UPDATE lines SET done = 1 WHERE number = ?", (number,))
        self._table.execute("COMMIT")

    def tokens_to_do(self) -> int:
        """Return the tokens of all lines that are still to do, by estimate."""
        row = self._table.execute("SELECT sum(tokens) FROM lines WHERE done = 0").fetchone()
        return int(row[0] or 0)

    def pending(self, *, in_blocks: bool) -> Iterator[PlannedLine]:
        """Yield what is to do, in the order of work. Lines must not be marked meanwhile.

        in_blocks: the order of work holds within blocks of the file, since answers keep the file's order and
        those that come too early have to wait in memory.
        """
        columns = "number, place, size, checksum, tokens, problem, prefix"
        sort = _SORTED[Order.GIVEN if in_blocks else self._order]
        select = f"SELECT {columns} FROM lines WHERE done = 0 ORDER BY {sort}"  # noqa: S608 - words from above
        rows = enumerate(self._table.execute(select))
        if not in_blocks:
            yield from (PlannedLine(turn, *row[:6]) for turn, row in rows)
            return
        while block := list(islice(rows, ORDERED_BLOCK)):
            if self._order is Order.LONGEST:
                block.sort(key=lambda numbered: -numbered[1][4])
            elif self._order is Order.PREFIX:
                block.sort(key=lambda numbered: numbered[1][6] or b"")
            yield from (PlannedLine(turn, *row[:6]) for turn, row in block)

    def bad_lines(self, most: int) -> list[Refusal]:
        """Return the first lines that cannot be answered, and why."""
        rows = self._table.execute(
            "SELECT number, problem FROM lines WHERE problem IS NOT NULL ORDER BY number LIMIT ?", (most,)
        )
        return [Refusal(*row) for row in rows]

    def read(self, planned: PlannedLine) -> BatchLine:
        """Return a line that is to do; one that cannot be answered is there with its id alone.

        Raises UsageError where the input is another one now.
        """
        raw = self._source.read(planned.place, planned.size)
        if zlib.crc32(raw) != planned.checksum:
            raise UsageError(
                f"line {planned.number} of the input was changed while the batch ran; put the old one back "
                "and run it again, or choose another output"
            )
        try:
            return self._form.read(planned.number, raw)
        except BadLineError as error:
            return BatchLine(planned.number, error.custom_id, "", b"")

    def close(self) -> None:
        """Give the table back."""
        self._table.close()


@contextlib.contextmanager
def make_plan(source: Source, form: LineForm, folder: Path, order: Order = Order.GIVEN) -> Iterator[Plan]:
    """Read the whole input and plan it.

    folder: an empty one, where the table lies meanwhile: about 100 bytes a line.
    Raises BatchInputError where lines cannot be told apart, ResourceError where there is no room for the
    table, UsageError, OSError.
    """
    try:
        plan = Plan(source, form, folder, order)
        try:
            plan.fill()
            yield plan
        finally:
            plan.close()
    except sqlite3.OperationalError as error:
        raise ResourceError(
            f"the plan of the batch cannot be kept in {folder} ({error}); make room there and in the folder "
            "for temporary files, and run the same command again"
        ) from error


def hash_id(custom_id: str) -> bytes:
    """Return what the plan keeps of an id: of 10 million, no two meet by chance."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
