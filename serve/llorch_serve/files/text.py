"""Text that came from outside and may be none: file names are bytes, and need not be UTF-8.

Python keeps such bytes as halves of surrogate pairs, which no encoder takes. Output has them as escapes, the
same ones that Python writes on stderr.
"""

from __future__ import annotations

from typing import Any

import msgspec


def writable(text: str) -> str:
    r"""Return ``text`` with an escape such as ``\udce9`` for each character that UTF-8 does not have."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def encode_json(document: object) -> bytes:
    """Return a document as JSON, its texts as :func:`writable` has them."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return msgspec.json.encode(_writable(msgspec.to_builtins(document)))


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return writable(value)
    if isinstance(value, dict):
        return {_writable(name): _writable(item) for name, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, (list, tuple)) else value
