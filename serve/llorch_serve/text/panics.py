"""Panics of libraries in Rust, which pyo3 raises as BaseException, made errors like any other.

Used around every call of such a library: a panic ends what was asked of it, and neither a thread nor the
worker.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from llorch_serve.errors import LibraryPanicError


def panics_as_errors(library: str) -> AbstractContextManager[None]:
    """Raise LibraryPanicError where ``library`` panics; all else passes, and so does what ends the process.

    Not for coroutines, whose cancellation is a BaseException too.
    """
    return _Guard(library)


class _Guard(AbstractContextManager[None]):
    """A class rather than a generator, as it stands around calls that are made for every token."""

    __slots__ = ("_library",)

    def __init__(self, library: str) -> None:
        self._library = library

    def __exit__(
        self, _kind: type[BaseException] | None, found: BaseException | None, _where: TracebackType | None
    ) -> None:
        if found is None or isinstance(found, (Exception, KeyboardInterrupt, SystemExit, GeneratorExit)):
            return
        # The panic's own words may quote what was worked on, which no log may hold.
        raise LibraryPanicError(
            f"{self._library} failed in its own code ({type(found).__name__}); what it was given is "
            f"damaged, or it has a defect"
        ) from None
