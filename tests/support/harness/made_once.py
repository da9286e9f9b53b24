"""What is made once a run, whichever of pytest-xdist's processes wants it first."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import filelock
import pytest

_LONGEST_S: Final = 900.0


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder or file of that name, which ``make`` puts where it is told. Another process that
    makes it is waited for. Raises filelock's Timeout if it takes longer than any test may.
    """
    base = factory.getbasetemp()  # of pytest-xdist's process, in a folder that all have
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    place.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(place.with_name(f"{place.name}.lock"), timeout=_LONGEST_S):
        if not place.exists():
            half = place.with_name(f"{place.name}.half")
            shutil.rmtree(half, ignore_errors=True)  # of a process that failed
            make(half)
            half.rename(place)
    return place
