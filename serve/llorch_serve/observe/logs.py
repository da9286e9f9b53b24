"""Log lines on stderr: one JSON object each for machines, or text for people at a terminal.

Input: the process's logging records. Output: lines from which secrets have been taken out. What is narrated
(see ``narration.py``) has its fields as keys of the object; control characters in a message cannot forge a
second line.
"""

from __future__ import annotations

import enum
import logging
import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

from llorch_serve.files.text import encode_json

FIELDS: Final = "llorch_fields"  # the record's attribute that narration leaves its fields in
HANDLER: Final = "llorch-json"  # the name of the handler that writes JSON
_BEARER: Final = re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]+")
# Those of eight bits too, which some terminals obey, and Unicode's own line ends.
_CONTROL: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    9: " ",
    10: "\\n",
    13: "\\r",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}
_REDACTED: Final = "[redacted]"


class LogFormat(enum.StrEnum):
    """How log lines look."""

    JSON = "json"
    TEXT = "text"


class LogLevel(enum.StrEnum):
    """What is logged: this and everything graver."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def set_up_logging(style: LogFormat, level: LogLevel, secrets: Iterable[str] = ()) -> None:
    """Log on stderr from now on, without the texts of ``secrets``."""
    handler = logging.StreamHandler(sys.stderr)
    hidden = tuple(secret for secret in secrets if secret)
    if style is LogFormat.JSON:
        handler.set_name(HANDLER)
        handler.setFormatter(JsonFormatter(hidden))
    else:
        handler.setFormatter(TextFormatter(hidden))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def writes_json() -> bool:
    """Tell whether this process's log is JSON, so that what is said beside it should be too."""
    return any(handler.get_name() == HANDLER for handler in logging.getLogger().handlers)


class TextFormatter(logging.Formatter):
    """Time, level, message."""

    def __init__(self, secrets: tuple[str, ...] = ()) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._secrets = secrets

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """Return the line without a traceback, which may have several."""
        return super().formatMessage(record).translate(_CONTROL)

    def format(self, record: logging.LogRecord) -> str:
        """Return the whole entry."""
        return _redact(super().format(record), self._secrets)


class JsonFormatter(logging.Formatter):
    """One object a line."""

    def __init__(self, secrets: tuple[str, ...] = ()) -> None:
        super().__init__()
        # As they stand inside a JSON string, where a quotation mark or a backslash is written as two
        # characters.
        self._secrets = tuple(encode_json(secret).decode()[1:-1] for secret in secrets)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        body: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "human": record.getMessage(),
        }
        body |= getattr(record, FIELDS, {})
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return _redact(encode_json(body).decode(), self._secrets)


def _redact(text: str, secrets: tuple[str, ...]) -> str:
    for secret in secrets:
        text = text.replace(secret, _REDACTED)
    return _BEARER.sub(rf"\1{_REDACTED}", text)
