"""The caller's own ids of a request, for logs and spans: how they travel with a call, and which are fit to be
told again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from llorch_serve.errors import FieldViolation, InvalidRequestError

CORRELATION_KEY: Final = "x-correlation-id"
REQUEST_KEY: Final = "x-request-id"
TRACE_KEY: Final = "traceparent"

_PLAIN: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class CallerIds:
    """correlation_id, traceparent: see :class:`llorch_serve.requests.GenerationRequest`; empty where there is
    none.
    """

    correlation_id: str = ""
    traceparent: str = ""


def plain_id(given: str) -> str:
    """Return an id as it is if it is 1 to 128 plain characters, else a digest of it that logs and headers may
    carry.
    """
    return given if _PLAIN.fullmatch(given) else hashlib.sha256(given.encode()).hexdigest()[:16]


def read_ids(metadata: Iterable[tuple[str, str | bytes]] | None) -> CallerIds:
    """Return the ids of a gRPC call; of its two names for the same, x-correlation-id goes first."""
    found = {key: value for key, value in metadata or () if isinstance(value, str)}
    given = found.get(CORRELATION_KEY) or found.get(REQUEST_KEY)
    return CallerIds(plain_id(given) if given else "", found.get(TRACE_KEY, ""))


def echo(ids: CallerIds) -> tuple[tuple[str, str], ...]:
    """Return what a call's answer begins with: its correlation id under both names, or nothing if it brought
    none.
    """
    return tuple((key, ids.correlation_id) for key in (CORRELATION_KEY, REQUEST_KEY) if ids.correlation_id)


def write_ids(correlation_id: str, traceparent: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call that carries these ids. Raises InvalidRequestError for those that none
    can carry.
    """
    bad = []
    if correlation_id and not _PLAIN.fullmatch(correlation_id):
        expected = "expected 1 to 128 letters, digits and ._:/+=@-, or none"
        bad.append(FieldViolation("correlation_id", f"found {correlation_id[:200]!r}, {expected}"))
    if traceparent and not _TRACEPARENT.fullmatch(traceparent):
        expected = "expected one as W3C Trace Context writes it, or none"
        bad.append(FieldViolation("traceparent", f"found {traceparent[:200]!r}, {expected}"))
    if bad:
        raise InvalidRequestError(bad)
    pairs = ((CORRELATION_KEY, correlation_id), (TRACE_KEY, traceparent))
    return tuple((key, value) for key, value in pairs if value)
