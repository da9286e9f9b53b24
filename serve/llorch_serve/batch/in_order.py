"""Lines of an output put into the input's order, where lines that were answered late lie at its end."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from llorch_serve.batch.appending import FULL
from llorch_serve.errors import ResourceError
from llorch_serve.files.durable import flush_folder


def put_in_order(path: Path, lines: Iterable[tuple[int, int, int]], folder: Path) -> None:
    """Replace a file by one with the same lines in the order of their ranks, or leave it as it is.

    lines: rank, place and size in bytes of each. folder: on the same disk, for a table of them and the new
    file.
    Raises ResourceError if there is no room, OSError.
    """
    unfinished = folder / "in-order"
    with contextlib.closing(sqlite3.connect(folder / "in-order.sqlite3", isolation_level=None)) as table:
        table.execute("PRAGMA journal_mode=OFF")
        table.execute("PRAGMA synchronous=OFF")
        table.execute("DROP TABLE IF EXISTS places")
        table.execute("CREATE TABLE places (rank INTEGER PRIMARY KEY, place INTEGER, size INTEGER)")
        table.execute("BEGIN")
        table.executemany("INSERT INTO places VALUES (?, ?, ?)", lines)
        table.execute("COMMIT")
        sorted_places = table.execute("SELECT place, size FROM places ORDER BY rank")
        try:
            with path.open("rb") as found, unfinished.open("wb") as file:
                _copy(found, file, sorted_places)
                file.flush()
                os.fsync(file.fileno())
            unfinished.chmod(path.stat().st_mode & 0o777)
            unfinished.replace(path)
        except OSError as error:
            if error.errno in FULL:
                raise ResourceError(
                    f"{path} has all lines, and there is no room to put them into the input's order "
                    f"({error.strerror}): make room for the file once more and run the same command again"
                ) from error
            raise
    flush_folder(path.parent)


def _copy(found: BinaryIO, file: BinaryIO, places: Iterable[tuple[int, int]]) -> None:
    for place, size in places:
        found.seek(place)
        file.write(found.read(size))
