"""How much room files and batches may take, of one caller and of all.

Input: bytes and files as they come and go. Output: refusals that say whose room is full. Not thread-safe: the
store holds its lock.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from llorch_serve.http.batches.settings import BatchSettings
from llorch_serve.http.problems import HttpError

_MAKE_ROOM: Final = "delete files, or have whoever runs the worker raise"


class Quota:
    """Counts bytes and files by owner."""

    def __init__(self, settings: BatchSettings) -> None:
        self._settings = settings
        self._bytes: Counter[str] = Counter()
        self._files: Counter[str] = Counter()

    def take(self, owner: str, size: int) -> None:
        """Count bytes that a caller adds. Raises HttpError if there is no room."""
        caller, total = self._bytes[owner] + size, self._bytes.total() + size
        if caller > self._settings.caller_bytes:
            raise _full(f"your files take more than {self._settings.caller_bytes} bytes", "--batch-quota")
        if total > self._settings.total_bytes:
            raise _full(f"all files take more than {self._settings.total_bytes} bytes", "--batch-quota-total")
        self._bytes[owner] = caller

    def count(self, owner: str, size: int) -> None:
        """Count bytes that are there in any case."""
        self._bytes[owner] += size

    def give_back(self, owner: str, size: int) -> None:
        """Count bytes that are gone."""
        _subtract(self._bytes, owner, size)

    def take_file(self, owner: str) -> None:
        """Count a file that a caller adds. Raises HttpError if it has too many."""
        if self._files[owner] >= self._settings.caller_files:
            raise _full(f"you have {self._files[owner]} files", "--batch-files")
        if self._files.total() >= self._settings.total_files:
            raise _full(f"all callers have {self._files.total()} files", "the limit")
        self._files[owner] += 1

    def count_file(self, owner: str) -> None:
        """Count a file that is there in any case."""
        self._files[owner] += 1

    def give_back_file(self, owner: str) -> None:
        """Count a file that is gone."""
        _subtract(self._files, owner, 1)


def _subtract(counter: Counter[str], owner: str, amount: int) -> None:
    counter[owner] -= amount
    if not counter[owner]:
        del counter[owner]


def _full(found: str, flag: str) -> HttpError:
    # 400, which clients do not send again by themselves.
    return HttpError(400, "quota_exceeded", f"{found}, which is the most; {_MAKE_ROOM} {flag}")
