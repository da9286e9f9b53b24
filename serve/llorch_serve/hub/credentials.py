"""Passwords and tokens that belong to a hub: kept out of what is shown, and looked at before they are sent.

Input are texts that a client, or its HTTP library, has made of an address or a header; output are texts that
a person may paste into a report.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Final

from llorch_serve.errors import UsageError

_HIDDEN: Final = "[redacted]"
_IN_ADDRESS: Final = re.compile(r"(?<=//)[^/\s]*@")  # a password may hold an @
_IN_HEADER: Final = re.compile(r"(?i)\b(bearer|basic)(\s+|%20)[^\s'\",)\]}]+")
_TOKEN: Final = re.compile(r"[\x21-\x7e]")


def hide_credentials(text: str) -> str:
    """Return ``text`` without user and password of its addresses, and without what its headers hold."""
    return _IN_HEADER.sub(rf"\1 {_HIDDEN}", _IN_ADDRESS.sub("", text))


def hub_address() -> str:
    """Return the hub's address, ``HF_ENDPOINT``, as it may be shown."""
    from huggingface_hub import constants

    return hide_credentials(constants.ENDPOINT)


def require_usable_token() -> None:
    """Raise UsageError if the token of the Hugging Face hub cannot be sent."""
    from huggingface_hub import get_token

    require_sendable(get_token() or "", "HF_TOKEN, or of 'hf auth login',")


def require_sendable(token: str, origin: str) -> None:
    """Raise UsageError if a token, of ``origin``, cannot be sent: the HTTP library would quote it."""
    place = next((place for place, one in enumerate(token, 1) if _TOKEN.fullmatch(one) is None), None)
    if place is not None:
        raise UsageError(
            f"the token of {origin} has a character that no token has, at place {place} of {len(token)}; "
            "copy it again"
        )


class _Redacting(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = hide_credentials(record.getMessage()), None
        return True


@contextlib.contextmanager
def redacted_warnings() -> Iterator[None]:
    """Have huggingface_hub's own log show no credentials: it warns of addresses that it asks again."""
    handlers, redacting = list(logging.getLogger("huggingface_hub").handlers), _Redacting()
    for handler in handlers:
        handler.addFilter(redacting)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(redacting)
