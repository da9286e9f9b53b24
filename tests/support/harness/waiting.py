"""Waiting for what tells nobody that it has happened."""

from __future__ import annotations

import time
from collections.abc import Callable

from support.fakes.generator import PATIENCE_S


def until(happened: Callable[[], object]) -> None:
    """Return once something has happened."""
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end, "it never happened"
