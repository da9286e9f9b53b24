"""Panics of libraries in Rust, which pyo3 raises as BaseException, made errors like any other.

Used around every call of such a library: a panic ends what was asked of it, and neither a thread nor the
worker.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from llorch_serve.errors import LibraryPanicError


def panics_as_errors(library: str) -> PanicGuard:
    """Raise LibraryPanicError where ``library`` panics; all else passes, and so does what ends the process.

    Not for coroutines, whose cancellation is a BaseException too.
    """
    return PanicGuard(library)


class PanicGuard(AbstractContextManager[None]):
    """A class rather than a generator, since it is used around calls that are made for every token.

    Where entering it costs too much, :meth:`check` takes what a call of the library has raised.
    """

    __slots__ = ("_library",)

    def __init__(self, library: str) -> None:
        self._library = library

    def __exit__(
        self, _kind: type[BaseException] | None, found: BaseException | None, _where: TracebackType | None
    ) -> None:
        if found is not None:
            self.check(found)

    def check(self, found: BaseException) -> None:
        """Raise LibraryPanicError if ``found`` is a panic."""
        if isinstance(found, (Exception, KeyboardInterrupt, SystemExit, GeneratorExit)):
            return
        # The panic's own words may quote what was worked on, which no log may hold.
        raise LibraryPanicError(
            f"{self._library} failed in its own code ({type(found).__name__}); what it was given is "
            f"damaged, or it has a defect"
        ) from None
