"""What is made once a run, whichever of pytest-xdist's processes wants it first."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder or file of that name, which ``make`` puts there whole or not at all. Another process
    that makes it is waited for.
    """
    base = factory.getbasetemp()  # of pytest-xdist's process, in a folder that all have
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    place.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(place.with_name(f"{place.name}.lock")):
        if not place.exists():
            make(place)
    return place
