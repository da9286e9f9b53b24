"""Where llorch keeps what it can make, or fetch, again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of cached exports: LLORCH_CACHE, else the user's cache folder."""
    if value := os.environ.get("LLORCH_CACHE"):
        return Path(value)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "llorch"
