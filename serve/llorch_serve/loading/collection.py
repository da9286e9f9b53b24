"""Python's garbage collector while a model is loaded: off, since a load makes hundreds of thousands of
objects and next to no garbage.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect nothing inside. Afterwards all is collected as ever: a model that is let go of is made of
    cycles, so it must not be frozen.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
