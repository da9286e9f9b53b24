"""Which path was meant, where nothing is served at the one that was called.

Base URLs are copied with ``/v1`` or without, with a slash at the end or with the whole route, and clients put
their own path behind them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

_VERSION: Final = "/v1"
_LIST: Final = "/v1/models"  # what a client can ask for of a base URL alone


def nearest_path(asked: str, served: Collection[str]) -> str | None:
    """Return the served path that was meant: the longest one that ``asked`` ends with, with or without
    /v1; None: it cannot be told.
    """
    plain = "/" + "/".join(part for part in asked.split("/") if part)
    if plain == _VERSION:
        return _LIST
    short = {path.removeprefix(_VERSION): path for path in served}
    found = [path for path in short if len(path) > 1 and plain.endswith(path)]
    return short[max(found, key=len)] if found else None
