"""Where spans are sent: a URL that is refused at start where nothing can be sent to it."""

from __future__ import annotations

from urllib.parse import urlsplit

from llorch_serve.errors import UsageError


def check_endpoint(source: str, endpoint: str) -> None:
    """Raise UsageError for an address that spans cannot be sent to: the exporter would only log, again and
    again. source: the flag or key, for messages.
    """
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        usable = False
    if not usable or parts.query or parts.fragment:
        raise UsageError(f"{source} is {endpoint[:200]!r}; expected a URL like http://127.0.0.1:4318")
