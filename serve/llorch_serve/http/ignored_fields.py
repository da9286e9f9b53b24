"""Tells the log of fields that were left aside: each name once for each route, however often it comes.

Input: the paths that reading a body has left aside. Output: a line of the log for those that are new.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable
from typing import Final

from llorch_serve.calls.callers import Caller
from llorch_serve.http.service import Plan
from llorch_serve.http.unknown_fields import UnknownFields
from llorch_serve.requests import ModelInfo

Read = Callable[[bytes, ModelInfo, Caller, list[str] | None], Plan]
"""Reads a body. The list gets the fields that were left aside; without a list they are refused."""

MOST_NAMES: Final = 256
"""Names that one route tells at most, as callers invent them."""

_PLACE: Final = re.compile(r"\[\d+\]")
_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.\[\]-]*")

logger = logging.getLogger(__name__)


class IgnoredFields:
    """Tells the log of each field of one route once. Any thread."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def note(self, paths: Iterable[str]) -> None:
        """Log those that are new and plain words, without their places in lists."""
        names = {_PLACE.sub("[]", path) for path in paths if _PLAIN.fullmatch(path)}
        with self._lock:
            new = sorted(names - self._told)[: MOST_NAMES - len(self._told)]
            self._told.update(new)
        if new:
            logger.warning("unknown fields of requests are ignored: %s", ", ".join(new))


def noting(read: Read, unknown: UnknownFields) -> Callable[[bytes, ModelInfo, Caller], Plan]:
    """Return what reads bodies as the worker is told to, and tells the log what was left aside."""
    if unknown is UnknownFields.REFUSE:
        return lambda raw, info, caller: read(raw, info, caller, None)
    told = IgnoredFields()

    def reading(raw: bytes, info: ModelInfo, caller: Caller) -> Plan:
        ignored: list[str] = []
        plan = read(raw, info, caller, ignored)
        told.note(ignored)
        return plan

    return reading
