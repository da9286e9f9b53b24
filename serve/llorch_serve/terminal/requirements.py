"""Turning a missing library into the line that installs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from llorch_serve.errors import ProviderError


@contextlib.contextmanager
def required(extra: str) -> Iterator[None]:
    """Raise ProviderError with the pip line for ``extra`` if an import inside fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ProviderError(
            f"{error.name} is not installed, and this command needs it; install it with: pip install "
            f"'llorch[{extra}]'"
        ) from error
