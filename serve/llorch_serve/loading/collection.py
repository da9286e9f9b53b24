"""Python's garbage collector while a model is loaded: off, since a load makes hundreds of thousands of
objects and next to no garbage.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect nothing inside. What is there afterwards is left out of later collections, which would go
    through a tokenizer's vocabulary each time, until a worker that is closed ends that (``gc.unfreeze``).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_on:
            gc.enable()
