"""Turning a missing library into the line that installs it."""

from __future__ import annotations

import contextlib
import os
import sys
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


def require_signing() -> None:
    """Import what makes and checks signatures. Raises ProviderError if it is missing."""
    with required("signing"):
        import model_signing.signing
        import model_signing.verifying  # noqa: F401 - fails here, with the line to install it


def require_hub_client() -> None:
    """Import the hub's client, which draws bars only on a terminal. Raises ProviderError if it is missing."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when the client is imported
    with required("hub"):
        import huggingface_hub  # noqa: F401 - fails here, with the line to install it
