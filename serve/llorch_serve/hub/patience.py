"""How long a hub is waited for: what its client would wait out, or ask again and again, ends as an error.

Input are the client's requests and the hub's answers, as its HTTP library tells of them; output is an error
once a hub asks for a longer pause than a person would wait, or has been silent for too long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

LONGEST_PAUSE_S: Final = 60
LONGEST_SILENCE_S: Final = 30.0
_HEADERS_TIMEOUT_S: Final = 10.0


class LongPauseError(RuntimeError):
    """A hub that limits its requests asks for a pause that is not waited out. response: its answer."""

    def __init__(self, response: Any) -> None:
        super().__init__("the hub asks for a long pause")
        self.response = response


class SilenceTimeoutError(RuntimeError):
    """A hub has not answered several requests in a row."""


def requested_pause(headers: Any) -> int | None:
    """Return the seconds after which a hub wants to be asked again, from ``Retry-After`` or ``RateLimit``."""
    seconds = str(headers.get("Retry-After", "")).strip()
    if not seconds:
        fields = str(headers.get("RateLimit", "")).replace(" ", "").split(";")
        seconds = next((field[2:] for field in fields if field.startswith("t=")), "")
    return int(seconds) if seconds.isascii() and seconds.isdecimal() and len(seconds) < 20 else None


class Patience:
    """Watches requests one after another. clock: in seconds, never backwards."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._silent_since: float | None = None

    def asking(self, request: Any) -> None:
        """Take note of a request. Raises SilenceTimeoutError if those before have had no answer for long."""
        if request.method not in ("HEAD", "GET"):  # an upload may take its time
            return
        now = self._clock()
        if self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since > LONGEST_SILENCE_S:
            raise SilenceTimeoutError("the hub has not answered")
        if request.method == "HEAD":
            limits = request.extensions.get("timeout") or {}
            kinds = ("connect", "read", "write", "pool")
            request.extensions["timeout"] = {
                kind: min(limits.get(kind) or _HEADERS_TIMEOUT_S, _HEADERS_TIMEOUT_S) for kind in kinds
            }

    def answered(self, response: Any) -> None:
        """Take note of an answer. Raises LongPauseError if it asks for a pause that nobody would wait for."""
        self._silent_since = None
        if response.status_code in (429, 503):
            pause = requested_pause(response.headers)
            if pause is not None and pause > LONGEST_PAUSE_S:
                raise LongPauseError(response)
