"""Memory that loading a graph has freed, given back to the system.

Where the runtime widens weights as it loads them, it frees about as much on the way as it keeps, and glibc
holds on to that.
"""

from __future__ import annotations

import ctypes
import sys


def give_back_freed() -> None:
    """Give memory that this process has freed back to the system, where its C library can."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none, and holds on to less
        if trim is not None:
            trim(0)
