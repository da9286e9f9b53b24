"""Bodies and queries of files and batches, as typed values, with every bad field named at once.

Input: a JSON body, or a query. Output: what is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from starlette.datastructures import QueryParams

from llorch_serve.batch.lines import URLS
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.http.batches.lookup import Page
from llorch_serve.http.batches.uploads import check_expiry
from llorch_serve.http.fields import read_struct, refuse_fields

_WINDOW: Final = re.compile(r"([1-9][0-9]{0,2})([hd])")
_HOUR_S: Final = 3600
_UNITS: Final = {"h": _HOUR_S, "d": 24 * _HOUR_S}
_MOST_WINDOW_S: Final = 30 * _UNITS["d"]

_MOST_PAIRS: Final = 16  # these three as OpenAI has them
_MOST_KEY_CHARS: Final = 64
_MOST_VALUE_CHARS: Final = 512


class ExpiryBody(msgspec.Struct):
    """When files expire."""

    anchor: str
    seconds: int


class BatchBody(msgspec.Struct):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiryBody | None = None


@dataclass(frozen=True, slots=True)
class AskedBatch:
    """What a body asks for. seconds: of the completion window. output_seconds: after which results expire."""

    input_file_id: str
    endpoint: str
    completion_window: str
    seconds: int
    metadata: dict[str, str] | None
    output_seconds: int | None


def read_batch(raw: bytes, ignored: list[str] | None) -> AskedBatch:
    """Return what a body asks for. ignored: see ``read_struct``. Raises InvalidRequestError."""
    body = read_struct(raw, BatchBody, ignored)
    bad: list[FieldViolation] = []
    if body.endpoint not in URLS:
        found = f"found {body.endpoint[:100]!r}, expected one of {', '.join(URLS)}"
        bad.append(FieldViolation("endpoint", found))
    seconds = _window(body.completion_window)
    if seconds is None:
        found = f"found {body.completion_window[:100]!r}, expected 1h to 720h, or 1d to 30d, as 24h"
        bad.append(FieldViolation("completion_window", found))
    bad += _check_metadata(body.metadata or {})
    output_seconds = None
    if (expiry := body.output_expires_after) is not None:
        try:
            output_seconds = check_expiry(expiry.anchor, expiry.seconds, "output_expires_after")
        except InvalidRequestError as error:
            bad += error.violations
    if bad or seconds is None:
        refuse_fields(bad)
    return AskedBatch(
        body.input_file_id, body.endpoint, body.completion_window, seconds, body.metadata, output_seconds
    )


def _window(text: str) -> int | None:
    found = _WINDOW.fullmatch(text)
    if found is None:
        return None
    seconds = int(found[1]) * _UNITS[found[2]]
    return seconds if seconds <= _MOST_WINDOW_S else None


def _check_metadata(metadata: dict[str, str]) -> list[FieldViolation]:
    if len(metadata) > _MOST_PAIRS:
        return [FieldViolation("metadata", f"has {len(metadata)} keys, expected at most {_MOST_PAIRS}")]
    if any(len(key) > _MOST_KEY_CHARS or len(metadata[key]) > _MOST_VALUE_CHARS for key in metadata):
        found = f"expected keys of at most {_MOST_KEY_CHARS} characters and values of {_MOST_VALUE_CHARS}"
        return [FieldViolation("metadata", found)]
    return []


@dataclass(frozen=True, slots=True)
class ListForm:
    """What the query of a list may say beside ``after``. most, usual: of ``limit``. names: further ones."""

    most: int
    usual: int
    names: tuple[str, ...] = ()

    @property
    def known(self) -> tuple[str, ...]:
        """The names that a query may have."""
        return ("after", "limit", *self.names)

    def read(self, query: QueryParams) -> tuple[Page, str | None]:
        """Return which page is asked for, and of which purpose. Raises InvalidRequestError."""
        bad = _check_names([name for name, _ in query.multi_items()], self.known)
        limit = query.get("limit", str(self.usual))
        if not (limit.isascii() and limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= self.most):
            bad.append(FieldViolation("limit", f"found {limit[:100]!r}, expected 1 to {self.most}"))
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            bad.append(FieldViolation("order", f"found {order[:100]!r}, expected asc or desc"))
        if bad:
            refuse_fields(bad)
        return Page(int(limit), query.get("after"), order == "asc"), query.get("purpose")


FILES: Final = ListForm(10_000, 10_000, ("order", "purpose"))
BATCHES: Final = ListForm(100, 20)


def _check_names(asked: Sequence[str], known: Sequence[str]) -> list[FieldViolation]:
    bad = [
        FieldViolation(name[:100], f"unknown; known are {', '.join(known)}. Leave it out")
        for name in dict.fromkeys(asked)
        if name not in known
    ]
    bad += [
        FieldViolation(name, "sent twice, expected once")
        for name in known
        if sum(other == name for other in asked) > 1
    ]
    return bad
