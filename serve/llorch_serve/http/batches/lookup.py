"""What one caller sees of records that belong to many: its own ones, one by one or by pages.

Input: records, and whose they should be. Output: those of that caller; another's are not there for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llorch_serve.http.batches.records import BatchRecord, FileRecord
from llorch_serve.http.problems import HttpError

R = TypeVar("R", FileRecord, BatchRecord)


@dataclass(frozen=True, slots=True)
class Page:
    """What a list shows. after: an id, the last one of the page before; None: from the beginning."""

    limit: int
    after: str | None = None
    oldest_first: bool = False


def own(kept: Mapping[str, R], name: str, owner: str, kind: str) -> R:
    """Return a caller's record. kind: of object, for messages. Raises HttpError if there is none."""
    record = kept.get(name)
    if record is None or record.owner != owner:
        raise HttpError(404, f"{kind}_not_found", f"you have no {kind} {name[:100]!r} here")
    return record


def page_of(kept: Sequence[R], owner: str, page: Page, kind: str) -> tuple[list[R], bool]:
    """Return a page of a caller's records, and whether there are more. kept: the oldest first.

    Raises HttpError if the page should begin after what is not there.
    """
    found = [record for record in kept if record.owner == owner]
    if not page.oldest_first:
        found.reverse()
    begin = 0
    if page.after is not None:
        ids = [record.id for record in found]
        if page.after not in ids:
            told = f"after is {page.after[:100]!r}, and you have no such {kind}; list from the beginning"
            raise HttpError(404, f"{kind}_not_found", told)
        begin = ids.index(page.after) + 1
    return found[begin : begin + page.limit], len(found) > begin + page.limit
