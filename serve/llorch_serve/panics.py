"""Panics of libraries in Rust, which pyo3 raises as BaseException, made errors like any other.

Used around every call of such a library: a panic ends what was asked of it, and neither a thread nor the worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from llorch_serve.errors import LibraryPanicError


@contextlib.contextmanager
def panics_as_errors(library: str) -> Iterator[None]:
    """Raise LibraryPanicError where ``library`` panics; all else passes, and so does what ends the process."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as panic:
        raise LibraryPanicError(f"{library} panicked: {panic}") from panic
