"""Signals that end a command which has begun to write."""

from __future__ import annotations

import signal
from types import FrameType


def unwind_on_signals() -> None:
    """Have SIGINT and SIGTERM raise KeyboardInterrupt, so that what was written is removed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Unwind. A second signal must not cut that short."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
